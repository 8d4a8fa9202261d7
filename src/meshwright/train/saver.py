"""A Saver writes the checkpoints of a run, beside its steps.

    begin     (all ranks)  plan, check that the disk has room, copy the state to host memory        training waits for this
              (a thread)   every rank writes its file into the draft, and leaves a note with its checksum
              (its thread) the first rank waits for the notes, adds contents and manifest, and renames the draft
    settle    (all ranks)  wait for the threads; every rank learns how it ended                      at the next `begin`, at the end

Threads never talk to other ranks but through the draft's folder, which all ranks see: no collective of a save can meet one of a
step. One checkpoint is under way at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp

from meshwright.core.errors import CheckpointError
from meshwright.core.units import format_bytes
from meshwright.runtime.gather import all_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.train.checkpoint_files import ALL, FileWriter, ValuesPlanner, flatten
from meshwright.train.kept import clear_drafts, draft_of, latest, name_of, publish
from meshwright.train.position import Progress
from meshwright.train.saved import SavedState
from meshwright.train.staging import Staging
from meshwright.train.writing import Writing, words

SEEN_SECONDS = 120.0
"""For the first rank to see what others have written: file systems of a network take their time."""
FARE_BYTES = 1 << 20
"""Beside the tensors, at least: contents, plan, settings."""


class Saver:
    def __init__(
        self,
        program: Program,
        folder: Path,
        rank: Rank,
        keep: int,
        asynchronous: bool = True,
        attached: Mapping[str, str] | None = None,
    ) -> None:
        """attached: name → text of files that go along."""
        self.program, self.folder, self.rank, self.keep = program, folder, rank, keep
        self.attached = dict(attached or {})
        self.staging = Staging(rank.device) if asynchronous else None
        self._writing: Writing | None = None

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint and wait for it."""
        self.begin(progress)
        path = self.settle()
        assert path is not None
        return path

    def begin(self, progress: Progress) -> None:
        """The state of now will be written. Where the host has no memory for a copy of it, it is written at once."""
        assert self._writing is None, "a checkpoint is under way: settle first"
        draft = draft_of(self.folder, progress.step)
        writer = FileWriter(self.rank.number, lambda needed: self._make_room(draft, needed), self.staging)
        self.program.sync_buffers()
        try:
            state = flatten(SavedState(self.program, self.rank).saved())
            dcp.save({ALL: state}, storage_writer=writer, planner=ValuesPlanner())
        except (Exception, dcp.CheckpointException) as error:
            raise self._failed(progress.step, words(error)) from error
        self._writing = Writing(writer, progress, draft, self.rank, self.attached, self._publish)
        self._writing.start()
        if not writer.copied:
            self._writing.wait()

    def settle(self) -> Path | None:
        """Wait for the checkpoint that is under way; None where none is. A failure is raised on every rank."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        problem = _first(all_ranks("" if self.rank.is_first else writing.wait()))
        if self.rank.is_first:
            # all others are done: a full disk may not even have taken the note of one that failed
            writing.hurry(0.0 if problem else SEEN_SECONDS)
            own = writing.wait()
            problem = problem or (f"rank 0: {own}" if own else "")
        problem = all_ranks(problem)[0]
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

    def _make_room(self, draft: Path, needed: int) -> None:
        clear_drafts(self.folder)
        draft.mkdir(parents=True)
        free = shutil.disk_usage(draft).free
        if needed + FARE_BYTES > free:
            raise OSError(f"the disk is full: {format_bytes(needed)} are needed, {format_bytes(free)} are free")

    def _publish(self, draft: Path) -> None:
        publish(draft, self.keep)

    def _failed(self, step: int, problem: str) -> CheckpointError:
        if self.rank.is_first:
            clear_drafts(self.folder)
        previous = latest(self.folder)
        kept = f"the previous checkpoint, {previous.name}, is whole" if previous else "there is no earlier checkpoint"
        return CheckpointError(f"checkpoint of step {step} could not be written to {self.folder}: {problem}; {kept}")


def _first(problems: list[str]) -> str:
    return next((f"rank {number}: {text}" for number, text in enumerate(problems) if text), "")
