"""Checkpoints: sharded, whole or not at all, loadable under any other plan.

A checkpoint is written to a draft folder and renamed when every rank is done: a reader never meets half of one, and a full
disk or a crash leaves the previous one as it was. torch's distributed checkpoint writes and reshards the tensors.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from meshwright.core.codec import Value, load
from meshwright.core.errors import CheckpointError, InputError
from meshwright.core.units import format_bytes
from meshwright.runtime.gather import all_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.train.saved import SavedState, saved_bytes

_NAME = re.compile(r"step-(\d+)")


class Progress(Value, kw_only=True):
    """Where a run stands, beside its tensors."""

    format: Literal[1] = 1
    step: int
    cursor: int
    """Samples consumed."""
    plan: str
    graph: str
    num_ranks: int


def save(program: Program, progress: Progress, folder: Path, rank: Rank, keep: int) -> Path:
    """Write a checkpoint; older ones are removed only after it is whole."""
    target = folder / f"step-{progress.step:08d}"
    draft = folder / f".{target.name}.draft"
    program.sync_buffers()
    needed = sum(all_ranks(saved_bytes(program)))
    problem = _first_problem(_attempt(lambda: _make_room(draft, needed)) if rank.is_first else "")
    if not problem:
        problem = _first_problem(_attempt(lambda: _write(program, progress, draft, rank)))
    if not problem:
        problem = _first_problem(_attempt(lambda: _publish(draft, target, keep)) if rank.is_first else "")
    if problem:
        if rank.is_first:
            shutil.rmtree(draft, ignore_errors=True)
        previous = latest(folder)
        kept = f"the previous checkpoint, {previous.name}, is whole" if previous else "there is no earlier checkpoint"
        raise CheckpointError(f"checkpoint of step {progress.step} could not be written to {folder}: {problem}; {kept}")
    return target


def _attempt(work: Callable[[], None]) -> str:
    """Empty when it went well, else what went wrong: every rank must learn of it, none may hang.

    torch's CheckpointException is not an Exception.
    """
    try:
        work()
    except (Exception, dcp.CheckpointException) as error:
        return _words(error)
    return ""


def _first_problem(own: str) -> str:
    """What went wrong on some rank, the same words on all; torch tells every rank of a failure, with its rank."""
    problems = all_ranks(own)
    named = [text for text in problems if text.startswith("rank ")]
    others = [f"rank {number}: {text}" for number, text in enumerate(problems) if text]
    return next(iter(named or others), "")


def _words(error: BaseException) -> str:
    """The innermost cause, with the rank it happened on: torch wraps what the disk said in several layers."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        number, failure = next(iter(error.failures.items()))
        return f"rank {number}: {_words(failure[0] if isinstance(failure, tuple) else failure)}"
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _make_room(draft: Path, needed: int) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    free = shutil.disk_usage(draft).free
    if needed > free:
        raise OSError(f"the disk is full: {format_bytes(needed)} are needed, {format_bytes(free)} are free")


def _write(program: Program, progress: Progress, draft: Path, rank: Rank) -> None:
    dcp.save(SavedState(program, rank).saved(), checkpoint_id=str(draft))
    if rank.is_first:
        progress.save(draft / "progress.json")
        _flush(draft)


def _publish(draft: Path, target: Path, keep: int) -> None:
    """The draft becomes the checkpoint; one of the same step gives way only then."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    _remove_old(target.parent, keep)


def _flush(folder: Path) -> None:
    """On the disk before the rename, not only on its way there."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def restore(program: Program, graph: str, folder: Path, rank: Rank) -> Progress:
    """Load the newest checkpoint, laid out as the plan that runs now says."""
    newest = _newest(folder)
    progress = check_same_model(folder, graph)
    state = SavedState(program, rank)
    saved = state.saved()
    if progress.num_ranks != rank.num_ranks:
        del saved["random"]  # random states belong to ranks: another number of ranks draws anew
    try:
        _check_whole(newest, saved["model"])
        # a parameter that never got a gradient has optimizer state here, but had none when it was saved
        dcp.load(saved, checkpoint_id=str(newest), planner=DefaultLoadPlanner(allow_partial_load=True))
    except (Exception, dcp.CheckpointException) as error:
        raise CheckpointError(f"{newest} cannot be read: {_words(error)}") from error
    state.take(saved)
    return progress


def check_same_model(folder: Path, graph: str) -> Progress:
    """Where the newest checkpoint stands; one of another model is refused."""
    newest = _newest(folder)
    progress = load(newest / "progress.json", Progress)
    if graph and progress.graph != graph:
        raise CheckpointError(f"{newest} is of another model (graph {progress.graph}, not {graph})")
    return progress


def _check_whole(newest: Path, model: dict[str, Any]) -> None:
    """Every parameter and buffer must be there."""
    saved = dcp.FileSystemReader(str(newest)).read_metadata().state_dict_metadata
    missing = [name for name in model if f"model.{name}" not in saved]
    if missing:
        raise CheckpointError(f"it lacks '{missing[0]}'")


def _newest(folder: Path) -> Path:
    """The checkpoint to resume from."""
    newest = latest(folder)
    if newest is None:
        raise InputError(f"{folder} holds no checkpoint to resume from: start without --resume")
    return newest


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = _all(folder)
    return found[-1] if found else None


def _all(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / "progress.json").exists())


def _remove_old(folder: Path, keep: int) -> None:
    for path in _all(folder)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
