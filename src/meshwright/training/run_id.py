"""The id of a run: made with its folder, written into every checkpoint, and compared before one is restored or replaced.

    run.json                                   the run this folder is of
    checkpoints/step-N/progress.json: run      the run that wrote the checkpoint

A folder that somebody moves, or writes another run into, is so noticed by the run that lived there. Runs of earlier versions have
none: an empty id is compared with nothing.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Literal

from meshwright.core.codec import Value
from meshwright.core.errors import CheckpointError, InputError

FILE = "run.json"


class RunId(Value, kw_only=True):
    """Which run a folder belongs to: `run.json`."""

    format: Literal[1] = 1
    id: str


def new_id() -> str:
    return uuid.uuid4().hex[:16]


def read_id(folder: Path) -> str:
    """Of a run folder; empty where it has none that can be read."""
    try:
        return RunId.load(folder / FILE).id
    except InputError:
        return ""


def write_id(folder: Path, run: str) -> None:
    RunId(id=run).save(folder / FILE)


def check_same_run(checkpoint: Path, found: str, run: str) -> None:
    """found: what a checkpoint says; run: who asks for it."""
    if run and found and found != run:
        raise CheckpointError(
            f"{checkpoint} is of another run ({found}, not {run}): two runs have written into one folder; move it away to go on "
            f"from the checkpoint before it, or remove {FILE} from the run folder to go on from this one"
        )


def check_still_ours(folder: Path, run: str) -> None:
    """Before something is written into a run folder."""
    found = read_id(folder)
    if run and found and found != run:
        raise CheckpointError(
            f"{folder} is now the folder of another run ({found}, not {run}): nothing is written into it; move that one away, and "
            "this run's folder back"
        )
