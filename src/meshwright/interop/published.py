"""A Run: one measured training run of somebody's cluster, as a row of a table.

Columns are those of `runs.csv`: the model as a GPT-like decoder, the cluster's name, the plan, and what was measured. What a
source leaves open is empty. A *sweep* is a set of runs in which only the plan differs.

A row that cannot be read is kept as Unreadable, with what it says was measured: it counts as a run that cannot be predicted,
and never hides the rows beside it.
"""

from __future__ import annotations

import csv
import io
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.core.bounds import Count, Degree, Positive, Samples
from meshwright.core.codec import Value, decode
from meshwright.core.errors import InputError, nearest
from meshwright.core.files.given_file import read_given


class Measured(Value, kw_only=True):
    """The measured columns of a row; None where they are empty."""

    id: str
    source_table: str
    step_seconds: Positive | None = None
    peak_gb: Positive | None = None
    fits: bool | None = None


class Unreadable(Measured, kw_only=True):
    """A row with a cell that cannot be read."""

    problem: str


class Run(Measured, kw_only=True):
    """One published run of a language model: its sizes, its plan, and what was measured."""

    model: str = ""
    layers: Count
    hidden: Count
    heads: Count
    vocab: Count
    seq: Count
    cluster: str
    num_gpus: Degree
    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    vpp: Degree = 1
    micro_batch: Samples
    global_batch: Samples
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    precision: str = ""
    compiled: bool = False
    schedule: str = ""
    kind: str = ""
    source: str = ""
    notes: str = ""

    @property
    def sweep(self) -> tuple[object, ...]:
        """The columns that runs of one sweep have in common."""
        return (
            self.model, self.layers, self.hidden, self.heads, self.vocab, self.seq, self.cluster, self.num_gpus,
            self.global_batch, self.precision, self.compiled,
        )  # fmt: skip


_TEXT = ("id", "source_table", "model", "cluster", "precision", "schedule", "kind", "source", "notes")
_SWITCHES = ("sequence_parallel", "compiled", "fits")
_REAL = ("step_seconds", "peak_gb")
_MEASURED = (*_REAL, "fits")
_NEEDED = {
    "source_table", "layers", "hidden", "heads", "vocab", "seq", "cluster", "num_gpus", "micro_batch", "global_batch",
}  # fmt: skip


def read_runs(path: str | Path) -> tuple[Run | Unreadable, ...]:
    """All rows of a file, unreadable ones with the reason; a file without rows or a needed column is refused."""
    text = read_given(path, encoding="utf-8-sig")  # spreadsheets begin with a mark
    reader = csv.DictReader(io.StringIO(text))
    columns = set(reader.fieldnames or ())
    for missing in sorted(_NEEDED - columns):
        raise InputError(
            f"{path}: no column '{missing}' ({nearest(missing, columns)}): the columns are {', '.join(_columns())}"
        )
    runs = tuple(_row(row, f"{path}, line {number}") for number, row in enumerate(reader, start=2))
    if not runs:
        raise InputError(f"{path}: no rows")
    return runs


def _columns() -> tuple[str, ...]:
    return Run.__struct_fields__


def _row(row: dict[str, str], where: str) -> Run | Unreadable:
    cells = {name: text for name in _columns() if (text := (row.get(name) or "").strip())}
    try:
        return _run(cells, where)
    except InputError as error:
        name, table = cells.get("id", where), cells.get("source_table", "")
        return Unreadable(id=name, source_table=table, problem=str(error), **_measured(cells, where))


def _run(cells: dict[str, str], where: str) -> Run:
    raw = {"id": where, **{name: _cell(name, text, where) for name, text in cells.items()}}
    found = decode(raw, Run, where)
    if "dp" in cells:
        return found
    return msgspec.structs.replace(found, dp=max(1, found.num_gpus // (found.tp * found.pp)))


def _measured(cells: dict[str, str], where: str) -> dict[str, Any]:
    """The cells of an unreadable row that can be read."""
    found: dict[str, Any] = {}
    for name in _MEASURED:
        with suppress(InputError, KeyError):
            found[name] = _cell(name, cells[name], where)
    return found


def _cell(name: str, text: str, where: str) -> object:
    if name in _TEXT:
        return text
    if name == "recompute":
        return text.casefold()
    if name in _SWITCHES:
        if text.casefold() not in ("0", "1", "true", "false"):
            raise InputError(f"{where}: {name} is '{text}': write 0 or 1")
        return text.casefold() in ("1", "true")
    return _number(name, text, where)


def _number(name: str, text: str, where: str) -> float | int:
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"{where}: {name} is '{text}': write a number") from None
    if not isfinite(number) or (name in _REAL and number <= 0):
        raise InputError(f"{where}: {name} is '{text}': write a number above 0, or nothing where none was measured")
    return number if name in _REAL or not number.is_integer() else int(number)
