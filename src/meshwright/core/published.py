"""A Run: one measured training run of somebody's cluster, as a row of a table.

Columns are those of `runs.csv`: the model as a GPT-like decoder, the cluster's name, the plan, and what was measured. What a
source leaves open is empty. A *sweep* is a set of runs in which only the plan differs.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from meshwright.core.codec import Value, decode
from meshwright.core.errors import InputError, nearest

Count = Annotated[int, Meta(ge=1)]


class Run(Value, kw_only=True):
    id: str
    source_table: str
    model: str = ""
    layers: Count
    hidden: Count
    heads: Count
    vocab: Count
    seq: Count
    cluster: str
    num_gpus: Count
    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    vpp: Count = 1
    micro_batch: Count
    global_batch: Count
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    precision: str = ""
    compiled: bool = False
    schedule: str = ""
    step_seconds: Annotated[float, Meta(gt=0)] | None = None
    peak_gb: Annotated[float, Meta(gt=0)] | None = None
    fits: bool | None = None
    kind: str = ""
    source: str = ""
    notes: str = ""

    @property
    def sweep(self) -> tuple[object, ...]:
        """What runs of one sweep have in common."""
        return (
            self.model, self.layers, self.hidden, self.heads, self.vocab, self.seq, self.cluster, self.num_gpus,
            self.global_batch, self.precision, self.compiled,
        )  # fmt: skip


_TEXT = ("id", "source_table", "model", "cluster", "precision", "schedule", "kind", "source", "notes", "recompute")
_SWITCHES = ("sequence_parallel", "compiled", "fits")
_REAL = ("step_seconds", "peak_gb")


def read_runs(path: str | Path) -> tuple[Run, ...]:
    """All rows of a file, each checked; the first wrong one is named."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    reader = csv.DictReader(io.StringIO(text))
    columns = set(reader.fieldnames or ())
    needed = {
        "source_table",
        "layers",
        "hidden",
        "heads",
        "vocab",
        "seq",
        "cluster",
        "num_gpus",
        "micro_batch",
        "global_batch",
    }
    for missing in sorted(needed - columns):
        raise InputError(
            f"{path}: no column '{missing}' ({nearest(missing, columns)}): the columns are {', '.join(_columns())}"
        )
    runs = tuple(_run(row, f"{path}, line {number}") for number, row in enumerate(reader, start=2))
    if not runs:
        raise InputError(f"{path}: no rows")
    return runs


def _columns() -> tuple[str, ...]:
    return Run.__struct_fields__


def _run(row: dict[str, str], where: str) -> Run:
    raw: dict[str, Any] = {"id": where}
    for name in _columns():
        text = (row.get(name) or "").strip()
        if text:
            raw[name] = _cell(name, text, where)
    return decode(raw, Run, where)


def _cell(name: str, text: str, where: str) -> object:
    if name in _TEXT:
        return text
    if name in _SWITCHES:
        if text.lower() not in ("0", "1", "true", "false"):
            raise InputError(f"{where}: {name} is '{text}': write 0 or 1")
        return text.lower() in ("1", "true")
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"{where}: {name} is '{text}': write a number") from None
    return number if name in _REAL or not number.is_integer() else int(number)
