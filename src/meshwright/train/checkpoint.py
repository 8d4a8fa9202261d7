"""Checkpoints: sharded, whole or not at all, loadable under any other plan.

    step-00000200/
      manifest.json             size and checksum of every other file; written last
      progress.json             step, data cursor, plan, model, learning rate
      contents.json             which tensor, or part of one, lies in which file; and what is no tensor
      rank-00000.safetensors    what one rank wrote: parameters, optimizer state, random states
      plan.json, settings.toml  of the run

A checkpoint is written to a draft folder and renamed when every rank is done (`saver.py`): a reader never meets half of one, and
a full disk or a crash leaves the previous one as it was. torch's distributed checkpoint plans who writes and reads what
(`checkpoint_files.py`). Nothing in a checkpoint is pickled, so that to load one cannot run anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed.checkpoint as dcp

from meshwright.core.errors import CheckpointError, InputError
from meshwright.runtime.gather import all_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.train.checkpoint_files import ALL, FileReader, PartsPlanner, flatten, with_values
from meshwright.train.contents import Contents, read_contents
from meshwright.train.kept import Where, all_of, latest, set_aside
from meshwright.train.manifest import DamagedError, check_files, read_manifest
from meshwright.train.position import Progress, check_format, read_progress
from meshwright.train.run_id import check_same_run
from meshwright.train.saved import SavedState
from meshwright.train.saver import Saver
from meshwright.train.writing import words

__all__ = ["Progress", "Shapes", "check_same_model", "latest", "restore", "save"]

T = TypeVar("T")
MODEL = "model."
"""Before the names of parameters and buffers."""
Shapes = Mapping[str, tuple[int, ...]]
"""Of whole parameters and buffers, by name."""


def save(program: Program, progress: Progress, folder: Path, rank: Rank, keep: int) -> Path:
    """Write a checkpoint and wait for it; older ones are removed only after it is whole."""
    return Saver(program, folder, rank, keep, asynchronous=False).save(progress)


def restore(
    program: Program,
    graph: str,
    folder: Where,
    rank: Rank,
    say: Callable[[str], None] = lambda text: None,
    run: str = "",
) -> Progress:
    """Load the newest checkpoint that is whole, laid out as the plan that runs now says. Every rank calls it.

    say: told when a newer one is damaged, and which is taken in its place. run: whose checkpoint it must be.
    """
    chosen = newest_whole(folder, rank, say)
    progress, contents = _together(lambda: (read_progress(chosen), read_contents(chosen)))
    check_same_run(chosen, progress.run, run)
    state = SavedState(program, rank)
    state.expect(contents)
    saved = state.saved()
    own = {name: tuple(tensor.shape) for name, tensor in saved["model"].items()}
    if graph and progress.graph != graph:
        shapes = {name: shape for part in all_ranks(own) for name, shape in part.items()}
        raise CheckpointError(difference(chosen, progress, graph, contents, shapes))
    _together(lambda: _check_has(chosen, contents, own))
    if progress.num_ranks != rank.num_ranks:
        del saved["random"]  # random states belong to ranks: another number of ranks draws anew
    planner = PartsPlanner()
    try:
        dcp.load({ALL: flatten(saved)}, storage_reader=FileReader(chosen, contents), planner=planner)
    except (Exception, dcp.CheckpointException) as error:
        raise CheckpointError(f"{chosen} cannot be read: {words(error)}") from error
    state.take(with_values(saved, planner.values))
    return progress


def check_same_model(folder: Where, graph: str, shapes: Callable[[], Shapes], run: str = "") -> Progress:
    """Where the newest checkpoint stands that can be read; one of another model or run is refused, before ranks start.

    shapes: of the model's tensors; asked for where the models differ.
    """
    for path in reversed(_all(folder)):
        try:
            progress = read_progress(path)
            read_manifest(path)
        except (InputError, DamagedError):
            continue  # the ranks look closer, and say what they find
        check_same_run(path, progress.run, run)
        if graph and progress.graph != graph:
            raise CheckpointError(difference(path, progress, graph, read_contents(path), shapes()))
        return progress
    raise CheckpointError(f"no checkpoint in {_home(folder)} is whole: start without --resume")


def difference(path: Path, progress: Progress, graph: str, contents: Contents, shapes: Shapes) -> str:
    """The first tensor in which a checkpoint and a model differ, in words."""
    saved = {
        name.removeprefix(MODEL): tensor.shape for name, tensor in contents.tensors.items() if name.startswith(MODEL)
    }
    head = f"{path} is of another model (graph {progress.graph}, not {graph})"
    for name, shape in shapes.items():
        if name not in saved:
            return f"{head}: it lacks '{name}', which is {list(shape)} here"
        if saved[name] != tuple(shape):
            return f"{head}: '{name}' is {list(saved[name])} there and {list(shape)} here"
    for name, shape in saved.items():
        if name not in shapes:
            return f"{head}: '{name}', {list(shape)}, is not in this model"
    return f"{head}: names and shapes are the same, but other parameters are tied or frozen"


def newest_whole(folder: Where, rank: Rank, say: Callable[[str], None]) -> Path:
    """Each rank checks its share of the files; a damaged checkpoint is set aside, and the one before it is tried."""
    found = all_ranks(_all(folder))[0]  # others may see the folder of a moment ago
    damages: list[str] = []
    while found:
        path = found.pop()
        damage = _damage(path, rank)
        if not damage:
            return path
        damages.append(damage)
        if rank.is_first:
            _put_away(path, damage, found, say)
    raise CheckpointError(f"no checkpoint in {_home(folder)} is whole: {'; '.join(damages)}; start without --resume")


def _damage(path: Path, rank: Rank) -> str:
    """What is wrong with a checkpoint, the same words on all ranks; empty where nothing is."""
    damage = problem = ""
    try:
        check_format(path)
        manifest = read_manifest(path)
        names = sorted(manifest.files, key=lambda name: -manifest.files[name].size_bytes)
        check_files(path, manifest, names[rank.number :: rank.num_ranks])
    except DamagedError as error:
        damage = str(error)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    answers = all_ranks((damage, problem))
    for _, problem in answers:
        if problem:
            raise CheckpointError(problem)
    return next((damage for damage, _ in answers if damage), "")


def _put_away(path: Path, damage: str, older: list[Path], say: Callable[[str], None]) -> None:
    try:
        now = f"it is now {set_aside(path).name}"
    except OSError as error:
        now = f"it could not be renamed ({error})"
    instead = f"going on from {older[-1].name}" if older else "there is no older one"
    say(f"warning: checkpoint {path.name} is damaged: {damage}; {now}; {instead}")


def _together(work: Callable[[], T]) -> T:
    """What one rank refuses, all refuse: none may be left waiting."""
    problem, result = "", None
    try:
        result = work()
    except (CheckpointError, InputError) as error:
        problem = str(error)
    for said in all_ranks(problem):
        if said:
            raise CheckpointError(said)
    return cast(T, result)


def _check_has(path: Path, contents: Contents, own: Shapes) -> None:
    """Every parameter and buffer of this rank must be there, in its shape."""
    for name, shape in own.items():
        found = contents.tensors.get(f"{MODEL}{name}")
        if found is None:
            raise CheckpointError(f"{path} cannot be read: it lacks '{name}'")
        if found.shape != shape:
            raise CheckpointError(
                f"{path} cannot be read: '{name}' is {list(found.shape)} there and {list(shape)} here"
            )


def _all(folder: Where) -> list[Path]:
    found = all_of(folder)
    if not found:
        raise InputError(f"{_home(folder)} holds no checkpoint to resume from: start without --resume")
    return found


def _home(folder: Where) -> Path:
    return folder if isinstance(folder, Path) else folder[0]
