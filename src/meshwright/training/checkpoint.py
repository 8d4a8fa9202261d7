"""Checkpoints: sharded, whole or not at all, loadable under any other plan.

    step-00000200/
      manifest.json             size and checksum of every other file; written last
      progress.json             step, data cursor, plan, model, learning rate
      contents.json             which tensor, or part of one, lies in which file; and what is no tensor
      rank-00000.safetensors    what one rank wrote: parameters, optimizer state, random states
      plan.json, settings.toml  of the run

A checkpoint is written to a draft folder and renamed when every rank is done (`saver.py`): a reader never meets half of one, and
a full disk or a crash leaves the previous one as it was. torch's distributed checkpoint says what a rank holds and needs
(`checkpoint_files.py`). Nothing in a checkpoint is pickled, so that to load one cannot run anything. What it must be and hold is
looked at before anything of it is taken over (`checked/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

from meshwright.core.errors import CheckpointError, InputError
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.training.checked.schema import Schema, Wanted, differences, schema_of, unknown
from meshwright.training.checked.schema import words as differing
from meshwright.training.checked.whole import Whole, check_whole
from meshwright.training.checkpoint_files import FileReader, Flat, flatten, with_values
from meshwright.training.contents import MODEL, Contents, read_contents
from meshwright.training.kept import Where, all_of, latest, set_aside
from meshwright.training.manifest import DamagedError, read_manifest
from meshwright.training.position import Progress, read_progress
from meshwright.training.run_id import check_same_run
from meshwright.training.saved import SavedState
from meshwright.training.saver import Saver
from meshwright.training.writing import words

__all__ = ["Progress", "Shapes", "check_same_model", "latest", "restore", "save"]

T = TypeVar("T")
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
    wanted: Wanted = "training",
) -> Progress:
    """Load the newest checkpoint that is whole, laid out as the plan that runs now says. Every rank calls it.

    say: told when a newer one is damaged, and which is taken in its place. run: whose checkpoint it must be. wanted: weights alone
    where the program will not train.
    """
    whole = newest_whole(folder, rank, say)
    path, progress, contents = whole.path, whole.progress, whole.contents
    check_same_run(path, progress.run, run)
    state = SavedState(program, rank)
    saved = state.saved()
    schema = schema_of(saved, program.plan.hash, rank.num_ranks, is_state_known=program.host is None)
    if graph and progress.graph != graph:
        own = {name: form.shape for name, form in schema.model.items()}
        shapes = {name: shape for part in all_ranks(own, dict[str, tuple[int, ...]]) for name, shape in part.items()}
        raise CheckpointError(difference(path, progress, graph, contents, shapes))
    check_schema(schema, whole, wanted)
    if program.host is not None:
        state.expect(contents)
        saved = state.saved()
    if progress.num_ranks != rank.num_ranks:
        del saved["random"]  # random states belong to ranks: another number of ranks draws anew
    state.take(with_values(saved, _together(lambda: _load(whole, flatten(saved)))))
    return progress


def check_schema(schema: Schema, whole: Whole, wanted: Wanted) -> None:
    """Every rank calls it. What is not as this run needs it is refused on all of them, before anything is changed."""
    _together(lambda: _refuse(whole.path, list(differences(schema, whole, wanted))))
    names = [*whole.contents.tensors, *whole.contents.values]
    strange = set(unknown(schema, whole.contents, wanted))
    marks = all_ranks(bytes(name in strange for name in names), bytes)
    nobodys = [name for name, *said in zip(names, *marks, strict=True) if all(said)]
    _refuse(whole.path, [f"it holds '{name}', which nothing here has" for name in nobodys])


def _refuse(path: Path, found: list[str]) -> None:
    if found:
        raise CheckpointError(
            f"{path} is not of this run: {differing(found)}; resume with the model, optimizer and plan that wrote it"
        )


def _load(whole: Whole, state: Flat) -> Flat:
    """What this rank needs, by itself; returns what is no tensor."""
    try:
        return FileReader(whole.path, whole.contents).load(state)
    except Exception as error:
        raise CheckpointError(f"{whole.path} cannot be read: {words(error)}") from error


def check_same_model(folder: Where, graph: str, shapes: Callable[[], Shapes], run: str = "") -> Progress:
    """Where the newest checkpoint stands that can be read; one of another model or run is refused, before ranks start.

    shapes: of the model's tensors; asked for where the models differ.
    """
    damages = []
    for path in reversed(_all(folder)):
        try:
            manifest = read_manifest(path)
            progress = read_progress(path, manifest)
        except (InputError, DamagedError) as error:  # where an older one is whole, the ranks say so
            damages.append(str(error))
            continue
        check_same_run(path, progress.run, run)
        if graph and progress.graph != graph:
            raise CheckpointError(difference(path, progress, graph, read_contents(path, manifest), shapes()))
        return progress
    raise _none_whole(folder, damages)


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


def newest_whole(folder: Where, rank: Rank, say: Callable[[str], None]) -> Whole:
    """Each rank checks its share of the files; a damaged checkpoint is set aside, and the one before it is tried."""
    found = [Path(path) for path in all_ranks([str(path) for path in _all(folder)], list[str])[0]]
    damages: list[str] = []
    while found:
        path = found.pop()
        whole = _looked_at(path, rank)
        if isinstance(whole, Whole):
            return whole
        damages.append(whole)
        if rank.is_first:
            _put_away(path, whole, found, say)
    raise _none_whole(folder, damages)


def _none_whole(folder: Where, damages: list[str]) -> CheckpointError:
    return CheckpointError(f"no checkpoint in {_home(folder)} is whole: {'; '.join(damages)}; start without --resume")


def _looked_at(path: Path, rank: Rank) -> Whole | str:
    """A checkpoint, where no rank finds anything wrong with it; else what is wrong, the same words on all ranks."""
    whole, damage, problem = None, "", ""
    try:
        whole = check_whole(path, rank.number, rank.num_ranks)
    except DamagedError as error:
        damage = str(error)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    answers = all_ranks((damage, problem), tuple[str, str])
    for _, problem in answers:
        if problem:
            raise CheckpointError(problem)
    found = next((damage for damage, _ in answers if damage), "")
    return found or cast(Whole, whole)


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
    for said in all_ranks(problem, str):
        if said:
            raise CheckpointError(said)
    return cast(T, result)


def _all(folder: Where) -> list[Path]:
    found = all_of(folder)
    if not found:
        raise InputError(f"{_home(folder)} holds no checkpoint to resume from: start without --resume")
    return found


def _home(folder: Where) -> Path:
    return folder if isinstance(folder, Path) else folder[0]
