"""What a run leaves to be plotted: JSON lines, and what boards show of them (training/boards.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.core.bounds import MOST_COUNT
from meshwright.core.codec import write_whole
from meshwright.core.errors import InputError
from meshwright.core.files.given_file import given_lines, open_given
from meshwright.training.boards import Board
from meshwright.training.folder import RunFolder
from meshwright.training.lines import LineFile

if TYPE_CHECKING:
    from meshwright.runtime.watch import Sample


class Metrics:
    """One line a step. Reopened after a resume, it drops the lines past the step it resumes from."""

    def __init__(self, folder: RunFolder, first_step: int, boards: Sequence[Board] = ()) -> None:
        _cut(folder.metrics, first_step)
        self.lines = LineFile(folder.metrics)
        self.boards = boards

    def write(self, step: int, values: dict[str, Any]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        self.lines.write(json.dumps({"step": step, **known}))
        self._show(step, known)

    def show_sample(self, step: int, sample: Sample) -> None:
        """What a recorder saw of a step, for boards alone: memory at the peak by category, time by part."""
        memory, seconds = (msgspec.structs.asdict(parts) for parts in (sample.memory_bytes, sample.time_seconds))
        self._show(
            step,
            {
                **{f"peak_bytes/{name}": value for name, value in memory.items()},
                **{f"sampled_seconds/{name}": value for name, value in seconds.items()},
            },
        )

    def _show(self, step: int, values: dict[str, Any]) -> None:
        for board in self.boards:
            with suppress(OSError):
                board.show(step, values)

    def close(self) -> bool:
        """Returns whether every line is written: a disk that is full to the end loses some, not the run."""
        for board in self.boards:
            with suppress(OSError):
                board.close()
        return self.lines.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines that are not what a step leaves are passed over."""
    return [entry for line in _lines(path) if (entry := _entry(line))]


def last_values(path: Path) -> dict[str, Any]:
    """The newest value of every metric."""
    return {name: value for line in read_metrics(path) for name, value in line.items()}


def values_at(path: Path, step: int) -> dict[str, Any]:
    """What was written down about a step; nothing where it was not reached, or a crash tore its line."""
    lines = read_metrics(path) if path.exists() else []
    return {name: value for line in lines if line["step"] == step for name, value in line.items()}


def last_loss(folder: RunFolder) -> float:
    """Of the steps before: a run that resumes at its very end has no other."""
    return float(last_values(folder.metrics).get("loss", "nan")) if folder.metrics.exists() else float("nan")


def dropped_tokens(path: Path) -> tuple[int, int]:
    """Choices of experts that were dropped in all steps, and all choices; both 0 where the model routes nothing."""
    lines = read_metrics(path) if path.exists() else []
    return sum(line.get("dropped_tokens", 0) for line in lines), sum(line.get("routed_tokens", 0) for line in lines)


def _cut(path: Path, first_step: int) -> None:
    """Drop the lines of that step and later ones. They are the last: to shorten a file needs no room on the disk."""
    if not path.exists():
        return
    lines = _lines(path)
    kept = [line for line in lines if line.endswith(b"\n") and _step(line) < first_step]
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))
    else:
        write_whole(path, b"".join(kept).decode(errors="replace"))


def _lines(path: Path) -> list[bytes]:
    """With their ends."""
    with open_given(path) as file:
        return list(given_lines(file))


def _entry(line: bytes) -> dict[str, Any]:
    """Empty where it is not what a step leaves, such as a line that was cut off by a crash."""
    try:
        return parse_line(line)
    except InputError:
        return {}


def _step(line: bytes) -> float:
    """The step of a line; one that is not whole belongs to no step that is kept."""
    return float(_entry(line).get("step", "inf"))


def parse_line(line: str | bytes) -> dict[str, Any]:
    """One line of `metrics.jsonl`, an object of numbers with its `step`; or an `InputError` that says what is wrong with it."""
    try:
        entry = _decoded(line)
    except (ValueError, RecursionError):
        # no text, no JSON, thousands of digits, or nested too deeply
        raise InputError("not valid JSON") from None
    if not isinstance(entry, dict) or not _is_step(entry.get("step")) or not all(map(_is_number, entry.values())):
        raise InputError("not what a step leaves")
    return entry


def _decoded(line: str | bytes) -> Any:
    """By msgspec, in a fifth of the time; NaN and Infinity, which a run that diverges writes, only Python's own reader takes."""
    try:
        return msgspec.json.decode(line)
    except ValueError:
        text = line if isinstance(line, str) else line.decode()
        if "NaN" in text or "Infinity" in text:
            return json.loads(text)
        raise


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def _is_number(value: object) -> bool:
    """Any float: a run that diverges writes NaN. A whole number that no float holds is none that a step counts."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= MOST_COUNT)
