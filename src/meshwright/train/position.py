"""Where a run stands, beside its tensors: `progress.json` of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from meshwright.core.codec import Value, load
from meshwright.core.errors import CheckpointError

FILE = "progress.json"
FORMAT = 2


class Progress(Value, kw_only=True):
    format: Literal[2] = 2
    step: int
    """That comes next."""
    cursor: int
    """Samples consumed."""
    plan: str
    graph: str
    num_ranks: int
    num_steps: int | None = None
    """What the learning rate's schedule counts to."""
    learning_rate: float | None = None
    """Of the step that comes next, by that schedule."""
    next_loss: float | None = None
    """Of the batch that comes next, without dropout and before its update: measured where a run ends, for `--verify`."""
    run: str = ""
    """Id of the run that wrote it (`run_id.py`)."""


def read_progress(folder: Path) -> Progress:
    """Of a checkpoint."""
    check_format(folder)
    return load(folder / FILE, Progress)


def check_format(folder: Path) -> None:
    """One of format 1 is refused: its tensors are pickled, and to unpickle is to run what is in there."""
    if format_of(folder) == 1:
        raise CheckpointError(
            f"{folder} is of format 1, pickled by an earlier version; this version reads format {FORMAT} and unpickles nothing: "
            "finish the run with the version that wrote it, or start it again without --resume"
        )


def format_of(folder: Path) -> object:
    """What a checkpoint says it is; None where it does not say."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes())["format"]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None
