"""`meshwright doctor`: each check says what it found and what to do; something broken is exit code 1."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import TORCHRUN, Cli

from meshwright.core.units import GIB, MIB
from meshwright.measure.checkup import machine, software
from meshwright.measure.checkup.between import check_skew
from meshwright.measure.checkup.finding import Finding, made
from meshwright.runtime.launch import launch
from meshwright.runtime.offload import kernel
from meshwright.runtime.offload.rules import find_rule

CHECKS = [
    "python", "torch", "backends", "devices", "peers", "shared memory", "open files", "disk", "cache", "clock", "ports",
    "host name", "compiler", "offloaded updates", "extras", "links", "clock skew",
]  # fmt: skip


def test_one_broken_thing_is_named_with_its_fix_and_is_exit_code_1(cli: Cli) -> None:
    """Nothing can be written under /proc, whoever asks."""
    ended = cli("doctor", "--device", "cpu", "--out", "/proc/self/runs", "--json")
    assert ended.code == 1
    assert [finding["check"] for finding in ended.json["findings"]] == CHECKS
    broken = [finding for finding in ended.json["findings"] if finding["status"] == "problem"]
    assert [finding["check"] for finding in broken] == ["disk"]
    assert "PROBLEM  disk: /proc/self cannot be written" in ended.err
    assert "fix: choose another folder with --out" in ended.err
    assert not ended.json["ok"]


def test_under_torchrun_hosts_are_told_apart_and_one_rank_speaks(cli: Cli) -> None:
    ended = cli("-m", "meshwright", "doctor", "--device", "cpu", launcher=TORCHRUN)
    assert ended.code == 0, ended.err
    assert ended.out.count("all-reduce between 2 ranks over gloo: right") == 1
    assert f"{socket.gethostname()} (host 0)" in ended.out
    assert "clocks of 2 ranks agree to" in ended.out


@pytest.mark.usefixtures("_ranks_are_forked")
def test_a_clock_that_is_ahead_is_named() -> None:
    found = launch("test_doctor:skewed", {"ahead": 3.0}, 2)
    assert (found["status"], found["found"]) == ("warning", "the clock of rank 1 is 3.00 s off that of rank 0")
    assert launch("test_doctor:skewed", {"ahead": 0.0}, 2)["status"] == "ok"


def skewed(payload: dict[str, float]) -> dict[str, Any]:
    import msgspec

    from meshwright.runtime.ranks import joined

    right = time.time
    if os.environ["RANK"] == "1":
        time.time = lambda: right() + payload["ahead"]
    with joined("cpu") as rank:
        return dict(msgspec.to_builtins(check_skew(rank)))


def free(count: int) -> Callable[[object], SimpleNamespace]:
    return lambda place: SimpleNamespace(free=count)


@pytest.mark.parametrize(("count", "status"), [(100 * MIB, "problem"), (5 * GIB, "warning"), (50 * GIB, "ok")])
def test_a_full_disk_is_seen(count: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", free(count))
    monkeypatch.setattr(machine, "_write_speed", lambda place: (1e9, 1e-3))
    assert machine.check_disk(tmp_path / "not" / "made").status == status
    assert not (tmp_path / "not").exists()


def test_a_slow_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", free(50 * GIB))
    for figures in ((1e6, 1e-3), (1e9, 2.0)):
        monkeypatch.setattr(machine, "_write_speed", lambda place, figures=figures: figures)
        assert machine.check_disk(tmp_path).status == "warning"


def test_the_speed_of_the_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    speed, sync = machine._write_speed(tmp_path)
    assert speed > 0
    assert sync > 0
    assert not list(tmp_path.iterdir())


def test_little_shared_memory_and_few_files_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", free(64 * MIB))
    assert machine.check_shared_memory(tmp_path).status == "warning"
    assert machine.check_shared_memory(tmp_path / "nowhere").status == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    found = machine.check_descriptors()
    assert (found.status, found.fix) == ("warning", "ulimit -n 1024")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    assert machine.check_descriptors().fix == "ulimit -n 65536"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    fix = machine.check_descriptors().fix
    assert "ulimit -n" not in fix, "it cannot be raised from here"
    assert "LimitNOFILE" in fix


def test_a_cache_that_cannot_be_written_is_seen(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = machine.check_cache(tmp_path / "file/meshwright")
    assert (found.status, "Not a directory" in found.found, "XDG_CACHE_HOME" in found.fix) == ("warning", True, True)
    assert machine.check_cache(tmp_path / "new").status == "ok"


def test_a_clock_that_is_set_while_it_is_looked_at_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([2e9, 2e9 + 100.0])
    monkeypatch.setattr(time, "time", lambda: next(readings))
    assert "it jumped by" in machine.check_clock().found
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert machine.check_clock().status == "problem"


def test_a_port_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        found = machine.check_ports()
    assert (found.status, found.found) == ("warning", f"port {port} is in use")
    assert machine.check_ports().status == "ok"


def test_an_interface_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = machine.check_name()
    assert found.status == "problem"
    assert "lo" in found.fix


@pytest.mark.parametrize(("hosts", "status"), [("1", "ok"), ("2", "warning")])
def test_a_name_that_means_loopback_matters_on_several_hosts(
    hosts: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    assert machine.check_name().status == status


def test_a_compiler_that_is_missing_or_broken_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.check_compiler().found == "no C++ compiler"
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho no such architecture >&2\nexit 1\n")
    broken.chmod(0o755)
    assert software.check_compiler().found == f"{broken} does not work: no such architecture"


def test_the_update_is_compiled_as_a_run_compiles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with g++ and no cc has a compiler for `--compile`, and none for the update."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    kernel.try_kernel.cache_clear()
    try:
        assert "no C compiler" in software.check_update().found
        broken = tmp_path / "cc"
        broken.write_text("#!/bin/sh\necho no such architecture >&2\nexit 1\n")
        broken.chmod(0o755)
        kernel.try_kernel.cache_clear()
        assert f"{broken} cannot compile it: no such architecture" in software.check_update().found
        optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
        with pytest.warns(RuntimeWarning, match="op by op"):
            find_rule(optimizer, torch.float32, 1)
    finally:
        kernel.try_kernel.cache_clear()


def test_a_cache_that_cannot_be_written_is_not_the_compilers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written under /proc, whoever asks."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/cache")
    kernel.try_kernel.cache_clear()
    try:
        finding = software.check_update()
    finally:
        kernel.try_kernel.cache_clear()
    assert finding.status == "warning"
    assert "/proc/self/cache/meshwright cannot be written" in finding.found
    assert finding.fix.startswith("set XDG_CACHE_HOME to a folder that can be written")


def test_a_check_that_fails_is_a_problem_and_not_the_end() -> None:
    def fail() -> Finding:
        raise OSError("no such thing")

    assert made("disk", fail) == Finding(
        check="disk", status="problem", found="the check itself failed: OSError: no such thing", fix="see the message"
    )
