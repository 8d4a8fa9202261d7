"""Lines of metrics are read once by who looks again and again, and never wrong for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.core.bounds import LONGEST_LINE_BYTES
from meshwright.core.errors import InputError
from meshwright.jobs import metric_lines
from meshwright.jobs.metric_lines import MetricLines
from meshwright.training.metrics import parse_line


def write(path: Path, *steps: int, loss: float = 1.0, mode: str = "a") -> None:
    with path.open(mode) as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def steps_of(lines: MetricLines) -> list[int]:
    return [line["step"] for line in lines.read()]


def test_what_was_added_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = MetricLines(path)
    assert lines.read() == ()
    write(path, 0, 1)
    assert steps_of(lines) == [0, 1]
    write(path, 2)
    assert steps_of(lines) == [0, 1, 2]


def test_only_what_was_added_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = MetricLines(path)
    write(path, *range(1000))
    lines.read()
    seen: list[bytes] = []
    monkeypatch.setattr(metric_lines, "parse_line", lambda line: seen.append(line) or parse_line(line))
    write(path, 1000)
    assert len(lines.read()) == 1001
    assert len(seen) == 1


def test_what_a_run_that_diverges_writes_is_read() -> None:
    entry = parse_line(b'{"step": 1, "loss": NaN, "norm": Infinity, "least": -Infinity, "peak": 1e300}')
    assert [str(entry[name]) for name in ("loss", "norm", "least")] == ["nan", "inf", "-inf"]
    for damaged in (
        b'{"step": 1}x',
        b'{"step": NaN}',
        b'{"step": 1, "loss": NaN',
        b"\xff",
        b'{"step": 1, "loss": 1e999}',
    ):
        with pytest.raises(InputError):
            parse_line(damaged)


def test_a_line_that_is_not_whole_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0)
    with path.open("a") as file:
        file.write('{"step": 1, "lo')
    lines = MetricLines(path)
    assert steps_of(lines) == [0]
    with path.open("a") as file:
        file.write('ss": 2.0}')
    assert steps_of(lines) == [0, 1], "it can be read, though its end is not there"
    with path.open("a") as file:
        file.write("\n")
    assert steps_of(lines) == [0, 1]


@pytest.mark.parametrize("steps", [(0, 1), (0, 1, 2), (0, 1, 2, 3, 4, 5)])
def test_a_run_that_goes_back_is_read_anew(tmp_path: Path, steps: tuple[int, ...]) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, 3)
    lines = MetricLines(path)
    lines.read()
    write(path, *steps, loss=2.0, mode="w")
    assert steps_of(lines) == list(steps)
    assert {line["loss"] for line in lines.read()} == {2.0}


def test_a_line_that_is_no_step_is_refused_every_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0)
    with path.open("a") as file:
        file.write("5\n")
    lines = MetricLines(path)
    for _ in range(2):
        with pytest.raises(InputError, match="line 2"):
            lines.read()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 4 << 30)


@pytest.mark.parametrize("make", [make_pipe, make_loop, make_device, make_huge, Path.mkdir])
def test_what_is_no_file_of_metrics_is_refused_unread(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    make(path)
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        MetricLines(path).read()


def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0)
    with path.open("ab") as file:
        file.write(bytes(3 * LONGEST_LINE_BYTES) + b"\n")
    write(path, 1)
    with pytest.raises(InputError, match="line 2"):
        MetricLines(path).read()
