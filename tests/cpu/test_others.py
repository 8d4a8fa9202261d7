"""Others on the same cores: seen while a machine is measured, and reason to measure it again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from meshwright.core.cluster import Cluster
from meshwright.measure import others, probe

TICKS = 100
USER, IDLE, STEAL = 0, 3, 7


def table(user: int, idle: int, steal: int) -> str:
    """The kernel's, of two cores that did the same and a third that is not ours."""
    columns = [0] * 10
    columns[USER], columns[IDLE], columns[STEAL] = user, idle, steal
    row = " ".join(map(str, columns))
    return f"cpu  {row}\ncpu0 {row}\ncpu1 {row}\ncpu2 99999 0 0 0 0 0 0 0 0 0\nintr 1 2 3\n"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    clock = iter((10.0, 12.0))
    monkeypatch.setattr(others, "STAT", tmp_path / "stat")
    monkeypatch.setattr(others.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(others.os, "sysconf", lambda _: TICKS)
    monkeypatch.setattr(others.time, "monotonic", lambda: next(clock))
    return tmp_path / "stat"


@pytest.mark.parametrize(
    ("user", "idle", "steal", "own", "share"),
    [
        (100, 100, 0, 2.0, 0.0),  # half of both cores for two seconds: all of it ours
        (100, 100, 0, 1.0, 0.25),
        (100, 0, 100, 2.0, 0.5),  # a neighbour of the virtual machine
        (0, 200, 0, 0.0, 0.0),
        (100, 100, 0, 3.0, 0.0),  # ticks are coarser than what processes are charged
    ],
)
def test_what_is_not_ours_is_others(
    kernel: Path, monkeypatch: pytest.MonkeyPatch, user: int, idle: int, steal: int, own: float, share: float
) -> None:
    used = iter((5.0, 5.0 + own))
    monkeypatch.setattr(others, "_own_seconds", lambda: next(used))
    kernel.write_text(table(1000, 1000, 1000))
    watch = others.Others()
    kernel.write_text(table(1000 + user, 1000 + idle, 1000 + steal))
    assert watch.share() == pytest.approx(share)


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(others, "STAT", tmp_path / "nothing")
    assert others.Others().share() == 0.0


@pytest.mark.parametrize(
    ("then", "now", "measured_again"),
    [(0.0, 0.0, False), (0.1, 0.0, False), (0.6, 0.5, False), (0.6, 0.1, True)],
)
def test_a_busy_measurement_is_replaced_when_it_is_quieter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, then: float, now: float, measured_again: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = msgspec.structs.replace(Cluster.named("h200-single"), others_share=then)
    known.save(probe.cache_file(1, "cpu", "gloo"))
    monkeypatch.setattr(probe, "share_now", lambda: now)
    started: list[str] = []

    def launch(target: str, *_: object) -> str:
        started.append(target)
        return msgspec.structs.replace(known, name="local").to_json()

    monkeypatch.setattr(probe, "launch", launch)
    told: list[str] = []
    found = probe.probe(1, device="cpu", backend="gloo", on_start=lambda: told.append("it begins"))
    assert bool(started) == bool(told) == measured_again
    assert found.name == ("local" if measured_again else known.name)
