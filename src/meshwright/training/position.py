"""Where a run stands, beside its tensors: `progress.json` of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from meshwright.core.bounds import Count, CountOrZero, Degree, NotNegative
from meshwright.core.codec import Value
from meshwright.core.errors import CheckpointError, InputError
from meshwright.core.files.given_file import parse_json, read_given_bytes
from meshwright.training.manifest import DamagedError, Manifest, check_plain, damage_of, read_listed, read_manifest

FILE = "progress.json"
FORMAT = 2


class Progress(Value, kw_only=True):
    """Where a run stands: `progress.json` of a checkpoint."""

    format: Literal[2] = 2
    step: CountOrZero
    """That comes next."""
    cursor: CountOrZero
    """Samples consumed."""
    plan: str
    graph: str
    num_ranks: Degree
    num_steps: Count | None = None
    """What the learning rate's schedule counts to."""
    learning_rate: NotNegative | None = None
    """Of the step that comes next, by that schedule."""
    next_loss: float | None = None
    """Of the batch that comes next, without dropout and before its update: measured where a run ends, for `--verify`."""
    run: str = ""
    """Id of the run that wrote it (`run_id.py`)."""


def read_progress(folder: Path, manifest: Manifest | None = None) -> Progress:
    """Of a checkpoint, by its manifest."""
    check_format(folder)
    text = read_listed(folder, read_manifest(folder) if manifest is None else manifest, FILE)
    try:
        return Progress.from_json(text, str(folder / FILE))
    except InputError as error:
        raise damage_of(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"{folder / FILE} cannot be read: {error}") from error


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
        check_plain(folder / FILE)
        raw = parse_json(read_given_bytes(folder / FILE), FILE)
    except (InputError, DamagedError):
        return None
    return raw.get("format") if isinstance(raw, dict) else None
