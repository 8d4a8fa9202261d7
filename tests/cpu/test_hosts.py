"""Two local hosts: made, limited, probed, and gone afterwards whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from forked import forked_on_host
from hosts import two_hosts, why_not

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InputError, RunError
from meshwright.runtime.template import Template

MISSING = why_not()
needs_hosts = pytest.mark.skipif(bool(MISSING), reason=MISSING)
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import this file's functions."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, BENCHMARKS, os.environ.get("PYTHONPATH", "")]))


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    return [name for name in listed if name.startswith("meshwright-")]


@needs_hosts
def test_a_host_reaches_the_other_and_nothing_else() -> None:
    with two_hosts() as hosts:
        talk = "import socket; socket.create_server(('', 5000)).accept()[0].sendall(b'x')"
        server = hosts.start(0, [sys.executable, "-c", talk])
        ask = textwrap.dedent("""
            import socket, time
            for _ in range(400):
                try:
                    assert socket.create_connection(("host0", 5000)).recv(1) == b"x"
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            try:
                socket.create_connection(("192.0.2.1", 80), timeout=1)
            except OSError as error:
                assert "unreachable" in str(error), error
        """)
        assert hosts.start(1, [sys.executable, "-c", ask]).wait(60) == 0
        assert server.wait(60) == 0
        names = [host.name for host in hosts.hosts]
        assert set(names) <= set(namespaces())
    assert not set(names) & set(namespaces())


@needs_hosts
def test_the_link_keeps_to_its_rate() -> None:
    """tc counts: it is told 40 Mbit/s, and 4 MB cannot pass it in less than 0.7 s, however fast or slow the machine is."""
    with two_hosts(bits_per_second=40e6) as hosts:
        take = "import socket; s = socket.create_server(('', 5000)).accept()[0]\nwhile s.recv(1 << 20): pass"
        taker = hosts.start(0, [sys.executable, "-c", take])
        give = textwrap.dedent("""
            import socket, time
            for _ in range(400):
                try:
                    link = socket.create_connection(("host0", 5000))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            link.sendall(bytes(4_000_000))
            link.shutdown(socket.SHUT_WR)
            link.recv(1)
        """)
        started = time.monotonic()
        hosts.start(1, [sys.executable, "-c", give]).wait(60)
        taker.wait(60)
        assert time.monotonic() - started > 0.7


@needs_hosts
@pytest.mark.usefixtures("_on_path")
def test_ranks_of_two_hosts_are_one_job(template: Template) -> None:
    with two_hosts(spawn=forked_on_host(template)) as hosts:
        found = hosts.launch("test_hosts:whoami", {"word": "hello"}, ranks_per_host=2)
    assert found == {"word": "hello", "sum": 6.0, "ranks": [[0, 0], [0, 1], [1, 0], [1, 1]]}


def whoami(payload: dict[str, str]) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    from meshwright.runtime.ranks import joined

    with joined("cpu") as rank:
        total = torch.tensor([float(rank.number)])
        dist.all_reduce(total)
        mine = [int(os.environ["GROUP_RANK"]), rank.local_number]
        every: list[object] = [None] * rank.num_ranks
        dist.all_gather_object(every, mine)
        return {**payload, "sum": float(total), "ranks": every}


@needs_hosts
@pytest.mark.usefixtures("_on_path")
def test_a_rank_that_fails_is_named_and_the_others_end(template: Template) -> None:
    with two_hosts(spawn=forked_on_host(template)) as hosts:
        with pytest.raises(RunError, match=r"rank 1 of 2 failed: .*on purpose"):
            hosts.launch("test_hosts:fail_on_one", {})
        assert all(process.poll() is not None for process in hosts.processes)


def fail_on_one(payload: dict[str, str]) -> None:
    if os.environ["RANK"] == "1":
        raise InputError("on purpose")
    time.sleep(600)


@needs_hosts
def test_nothing_is_left_after_an_error_or_a_signal() -> None:
    with pytest.raises(ZeroDivisionError), two_hosts() as hosts:
        raise ZeroDivisionError
    script = textwrap.dedent("""
        import signal, time
        from hosts import two_hosts
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell's background ignore it
        with two_hosts():
            print("up", flush=True)
            time.sleep(600)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([BENCHMARKS, *sys.path])}
    for number in (signal.SIGINT, signal.SIGTERM):
        run = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        run.send_signal(number)
        time.sleep(0.02)
        run.send_signal(number)  # an impatient hand, or `timeout`, which passes on what it was sent
        run.wait(60)
        run.stdout.close()
        assert not [name for name in namespaces() if f"-{run.pid}-" in name]
    assert not [host for host in hosts.hosts if host.name in namespaces()]


@needs_hosts
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    script = (
        "import sys, time; from hosts import two_hosts\n"
        "with two_hosts() as hosts:\n    hosts.start(0, ['sleep', '600']); print('up', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([BENCHMARKS, *sys.path])}
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    run.kill()
    run.wait(60)
    run.stdout.close()
    left = [name for name in namespaces() if f"-{run.pid}-" in name]
    assert left
    with two_hosts():
        assert not set(left) & set(namespaces())


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="need iproute2, and ip, tc is not here: install it"), two_hosts():
        pass


@needs_hosts
@pytest.mark.usefixtures("_on_path")
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_a_probe_over_two_hosts_sees_the_link_between_them(ranks_per_host: int, template: Template) -> None:
    """At 200 Mbit/s an all-reduce of 1 MiB between two hosts cannot take less than 0.035 s."""
    with two_hosts(bits_per_second=200e6, spawn=forked_on_host(template)) as hosts:
        found = hosts.launch("test_hosts:probe_few_sizes", {}, ranks_per_host)
    cluster = Cluster.from_json(found)
    assert (cluster.num_hosts, cluster.devices_per_host) == (2, ranks_per_host)
    assert (cluster.intra_host is None) == (ranks_per_host == 1)
    assert cluster.inter_host is not None
    assert cluster.inter_host.bytes_per_second < 1.2 * 200e6 / 8
    largest = max(point.seconds for point in cluster.collectives if point.kind == "all_reduce")
    assert largest > 0.035


def probe_few_sizes(payload: dict[str, str]) -> str:
    """The probe with its compute left out: the test is about links."""
    from meshwright.core.cluster import Rate
    from meshwright.measure import kernels, links, probe
    from meshwright.runtime.ranks import joined

    links.CPU_SIZES, links.OVERLAP_BYTES = (8, 2**20), 2**16
    rate = Rate(kind="matmul", dtype="fp32", size=1.0, per_second=1.0)
    kernels.measure_rates = lambda device: [rate]
    kernels.measure_launches = lambda device: (1.0, 1.0)
    kernels.measure_update = lambda device: 1.0
    probe.measure_split_launch = lambda device: 1.0
    probe.measure_halves_launch = lambda device, seconds: 1.0
    with joined("cpu") as rank:
        return probe.measure_cluster(rank).to_json()
