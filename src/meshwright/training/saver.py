"""A Saver writes the checkpoints of a run, beside its steps.

    begin     (all ranks)  plan (the first time), check for room, copy the state to host memory          training waits for this
              (a thread)   every rank writes its file into the draft, and leaves a note with its checksum
              (its thread) the first rank waits for the notes, adds contents and manifest, and renames the draft
    settle    (all ranks)  wait for the threads; every rank learns how it ended                      at the next `begin`, at the end

Threads never talk to other ranks but through the draft's folder, which all ranks see: no collective of a save can meet one of a
step. One checkpoint is under way at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from meshwright.core.errors import CheckpointError
from meshwright.core.units import format_bytes
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.rank import is_broken_link
from meshwright.runtime.ranks import Rank
from meshwright.training.checkpoint_files import FileWriter, Flat, flatten
from meshwright.training.contents import SavedTensor
from meshwright.training.dividing import Offer, check_complete, divided
from meshwright.training.kept import clear_drafts, draft_of, latest, name_of, publish
from meshwright.training.position import Progress
from meshwright.training.saved import SavedState
from meshwright.training.staging import Staging
from meshwright.training.writing import Writing, is_of_disk, words

SEEN_SECONDS = 120.0
"""For the first rank to see what others have written: file systems of a network take their time."""
FARE_BYTES = 1 << 20
"""Beside the tensors, at least: contents, plan, settings."""


Form = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Known:
    """How a state was divided among the ranks."""

    form: Form
    plan: SavePlan
    tensors: dict[str, SavedTensor]


class UnwrittenError(CheckpointError):
    """The disk did not take a checkpoint: it may take it later, or another disk may."""


class Saver:
    def __init__(
        self,
        program: Program,
        folder: Path,
        rank: Rank,
        keep: int,
        asynchronous: bool = True,
        attached: Mapping[str, str] | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """attached: name → text of files that go along. prepare: on the first rank, before room is made for a checkpoint."""
        self.prepare = prepare
        self.program, self.folder, self.rank, self.keep = program, folder, rank, keep
        self.attached = dict(attached or {})
        self.staging = Staging(rank.device) if asynchronous else None
        self._writing: Writing | None = None
        self._known: Known | None = None
        self._needed = 0

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint and wait for it."""
        self.begin(progress)
        path = self.settle()
        assert path is not None
        return path

    def begin(self, progress: Progress) -> None:
        """The state of now will be written. Where the host has no memory for a copy of it, it is written at once."""
        assert self._writing is None, "a checkpoint is under way: settle first"
        self.program.sync_buffers()
        draft = draft_of(self.folder, progress.step)
        writer = FileWriter(self.rank.number, self.staging)
        try:
            state = flatten(SavedState(self.program, self.rank).saved())
            known = self._known_to_all(state, draft) or self._divided(writer, state, draft)
        except Exception as error:
            if is_broken_link(error):  # a rank is gone: not a matter of this checkpoint
                raise
            raise self._failed(progress.step, words(error)) from error
        problem = _attempt(lambda: writer.take(known.plan, state))
        writer.tensors = known.tensors
        self._writing = Writing(writer, progress, draft, self.rank, self.attached, self._publish, problem)
        self._writing.start()
        if not writer.copied:
            self._writing.wait()

    def settle(self) -> Path | None:
        """Wait for the checkpoint that is under way; None where none is. A failure is raised on every rank."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        problem = _first(all_ranks("" if self.rank.is_first else writing.wait(), str))
        if self.rank.is_first:
            # all others are done: a full disk may not even have taken the note of one that failed
            writing.hurry(0.0 if problem else SEEN_SECONDS)
            own = writing.wait()
            problem = problem or (f"rank 0: {own}" if own else "")
        problem = all_ranks(problem, str)[0]
        if problem:
            raise self._failed(writing.progress.step, problem)
        return self.folder / name_of(writing.progress.step)

    def close(self, grace_seconds: float = 0.0) -> None:
        """After an error: other ranks may be gone. What is under way may still be finished by those who are there."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.hurry(grace_seconds)
            writing.wait()
        if self.staging is not None:
            self.staging.close()

    def _divided(self, writer: FileWriter, state: Flat, draft: Path) -> Known:
        """All ranks together: who writes what. The answer is kept for the next time, where tensors are copied."""
        self._known = None
        items: list[WriteItem] = []
        try:
            items, offer = writer.offer(state)
        except Exception as error:
            offer = Offer(problem=words(error))
        division = divided(offer)
        tensors = division.tensors()
        check_complete(tensors)
        problem = _attempt(lambda: self._make_room(draft, division.num_bytes)) if self.rank.is_first else ""
        _raise_first(all_ranks(problem, str))
        known = Known(_form(state), division.plan_of(self.rank.number, items), tensors)
        self._known = known if division.copies else None
        return known

    def _known_to_all(self, state: Flat, draft: Path) -> Known | None:
        """The plan of last time, where no rank's state has another form now: ranks exchange a word in place of plans."""
        known = self._known
        is_same = known is not None and known.form == _form(state)
        problem = _attempt(lambda: self._make_room(draft, self._needed)) if is_same and self.rank.is_first else ""
        answers = all_ranks((is_same, problem), tuple[bool, str])
        if not all(is_same for is_same, _ in answers):
            return None
        _raise_first([problem for _, problem in answers])
        return known

    def _make_room(self, draft: Path, needed: int) -> None:
        self._needed = needed
        self.prepare()
        clear_drafts(self.folder)
        draft.mkdir(parents=True)
        free = shutil.disk_usage(draft).free
        if needed + FARE_BYTES > free:
            whole = format_bytes(needed + FARE_BYTES)
            raise OSError(f"the disk is full: {whole} are needed, {format_bytes(free)} are free")

    def _publish(self, draft: Path) -> None:
        publish(draft, self.keep)

    def _failed(self, step: int, problem: str) -> CheckpointError:
        if self.rank.is_first:
            clear_drafts(self.folder)
        previous = latest(self.folder)
        kept = f"the previous checkpoint, {previous.name}, is whole" if previous else "there is no earlier checkpoint"
        kind = UnwrittenError if is_of_disk(problem) else CheckpointError
        return kind(f"checkpoint of step {step} could not be written to {self.folder}: {problem}; {kept}")


def _form(state: Flat) -> Form:
    """What a plan depends on."""
    return tuple(
        (name, tuple(item.shape), item.dtype, getattr(item, "placements", ())) if isinstance(item, Tensor) else (name,)
        for name, item in state.items()
    )


def _attempt(work: Callable[[], None]) -> str:
    """Empty when it went well, else what went wrong."""
    try:
        work()
    except Exception as error:
        return words(error)
    return ""


def _raise_first(problems: list[str]) -> None:
    if found := _first(problems):
        raise CheckpointError(found)


def _first(problems: list[str]) -> str:
    return next((f"rank {number}: {text}" for number, text in enumerate(problems) if text), "")
