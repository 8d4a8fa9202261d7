"""The command line over two hosts: `train` under torchrun, and a doctor that sees both and the link between them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import losses
from forked import forked_on_host
from hosts import Hosts, two_hosts, why_not

from meshwright.core.cluster import Link
from meshwright.core.run.trace import Trace
from meshwright.measure.host_links import HostLink, notes_on, pairs_of
from meshwright.runtime.template import Template
from meshwright.training.folder import RunFolder

MISSING = why_not()
needs_hosts = pytest.mark.skipif(bool(MISSING), reason=MISSING)
PATIENCE_SECONDS = 240


@pytest.fixture
def _ranks_find_us(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def run(hosts: Hosts, log: Path, *arguments: object) -> str:
    """A verb on both hosts; what all their ranks printed."""
    with log.open("wb") as output:
        agents = hosts.torchrun([str(argument) for argument in arguments], output=output)
        codes = [agent.wait(PATIENCE_SECONDS) for agent in agents]
    assert codes == [0, 0], log.read_text()
    return log.read_text()


@needs_hosts
@pytest.mark.usefixtures("_ranks_find_us")
def test_one_settings_file_trains_on_two_hosts_and_the_doctor_sees_both(
    settings: Callable[..., Path], template: Template, tmp_path: Path
) -> None:
    """At 80 Mbit/s each way, a message of 2 MiB cannot pass at more than 10 MB/s and what the bucket holds."""
    log = tmp_path / "log"
    with two_hosts(bits_per_second=80e6, spawn=forked_on_host(template)) as hosts:
        run(hosts, log, "train", settings(nproc=1), "--zero", 1)
        folder = RunFolder(tmp_path / "run")
        assert [step for step, _ in losses(folder.path)] == [0, 1, 2, 3]
        assert Trace.load(folder.trace).num_ranks == 2
        said = run(hosts, log, "doctor", "--device", "cpu", "--out", tmp_path)
    assert "(host 0)" in said
    assert "(host 1)" in said
    speed = float(said.partition("host 0 to host 1: ")[2].partition(" MB/s")[0])
    assert 0 < speed < 11


def test_every_pair_of_a_few_hosts_is_measured_and_a_ring_of_many() -> None:
    assert pairs_of(1) == []
    assert pairs_of(3) == [(0, 1), (0, 2), (1, 2)]
    assert len(pairs_of(8)) == 28
    assert pairs_of(9) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 0)]


def test_a_link_that_is_far_slower_than_the_others_is_named() -> None:
    def link(one: int, other: int, speed: float) -> HostLink:
        return HostLink(one, other, Link(bytes_per_second=speed, latency_seconds=1e-4, origin="probe"))

    even = notes_on((link(0, 1, 1e9), link(0, 2, 0.9e9), link(1, 2, 1.1e9)))
    assert even[0] == "host 0 to host 1: 1,000.0 MB/s, 0.100 ms"
    assert len(even) == 3
    odd = notes_on((link(0, 1, 1e9), link(0, 2, 0.1e9), link(1, 2, 1e9)))
    assert odd[-1] == "the link of host 0 and host 2 is 10.0 times slower than usual"
    assert notes_on(()) == ()
