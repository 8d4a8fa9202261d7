"""What the probe finds out about the host's disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pool import RankPool

from meshwright.measure.host import measure_disk

Pools = Callable[[int], RankPool]


def test_the_disk_is_written_and_left_as_it_was(pool: Pools, tmp_path: Path) -> None:
    (found,) = pool(1).run(measure_disk, tmp_path / "cache", 1)
    assert 0 < found < 1e12
    assert not list((tmp_path / "cache").iterdir())
    (many,) = pool(1).run(measure_disk, tmp_path / "cache", 1000)
    assert many > found, "what one rank wrote, for every rank of the host"


def test_a_folder_that_cannot_be_written(pool: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert pool(1).run(measure_disk, tmp_path / "file" / "cache", 1) == [0.0]
