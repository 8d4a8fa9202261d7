"""One checkpoint on its way to the disk, in a thread of its own on every rank."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.codec import Value
from meshwright.core.errors import CheckpointError
from meshwright.core.files.disk import FileFacts, flush_folder, write_file
from meshwright.runtime.ranks import Rank
from meshwright.training import contents, manifest, position
from meshwright.training.checkpoint_files import FileWriter
from meshwright.training.contents import contents_of, file_of
from meshwright.training.manifest import Manifest
from meshwright.training.position import Progress
from meshwright.training.tensors_file import write_tensors

LOOK_SECONDS = 0.01
"""Between two looks for the notes of other ranks, at first; then longer."""
LONGEST_LOOK_SECONDS = 0.5


class Note(Value, kw_only=True):
    """What a rank leaves in the draft when its file is written, or cannot be."""

    facts: FileFacts | None = None
    values: dict[str, Any] = msgspec.field(default_factory=dict)
    problem: str = ""


class Writing:
    def __init__(
        self,
        writer: FileWriter,
        progress: Progress,
        draft: Path,
        rank: Rank,
        attached: Mapping[str, str],
        publish: Callable[[Path], None],
        problem: str = "",
    ) -> None:
        """problem: why this rank has nothing to write, if so; the others must learn of it."""
        self.writer, self.progress, self.draft, self.rank = writer, progress, draft, rank
        self.attached, self.publish = attached, publish
        self._problem = problem
        self._values: dict[str, Any] = dict(writer.values)
        self._patience, self._hurried = float("inf"), 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> str:
        """Until this rank has nothing left to do; what went wrong, if anything did."""
        self._thread.join()
        return self._problem

    def hurry(self, seconds: float) -> None:
        """Wait for other ranks no longer than that, from now on or from when this rank has written its part."""
        self._patience, self._hurried = seconds, time.monotonic()

    def _run(self) -> None:
        try:
            if self._problem:
                raise CheckpointError(self._problem)
            facts = write_tensors(self.draft / self.writer.file, self.writer.entries)
            if self.rank.is_first:
                self._complete({self.writer.file: facts} | self._others())
            else:
                self._leave(Note(facts=facts, values=self._values))
        except Exception as error:
            self._problem = words(error)
            if not self.rank.is_first:
                self._tell_problem()
        finally:
            self.writer.entries.clear()  # tensors that were not copied are the program's

    def _leave(self, note: Note) -> None:
        """A note is whole when it has its name."""
        name = _note_name(self.rank.number)
        write_file(self.draft / f"{name}.draft", [msgspec.json.encode(note)])
        os.rename(self.draft / f"{name}.draft", self.draft / name)

    def _tell_problem(self) -> None:
        try:
            self._leave(Note(problem=self._problem))
        except OSError:
            return  # told when the ranks settle

    def _others(self) -> dict[str, FileFacts]:
        """The first rank: what the others have written."""
        found: dict[str, FileFacts] = {}
        pause, began = LOOK_SECONDS, time.monotonic()
        missing = set(range(1, self.rank.num_ranks))
        while missing:
            there = {number for number in missing if (self.draft / _note_name(number)).exists()}
            for number in sorted(there):
                note = msgspec.json.decode((self.draft / _note_name(number)).read_bytes(), type=Note)
                if note.facts is None:
                    raise CheckpointError(f"rank {number}: {note.problem}")
                found[file_of(number)] = note.facts
                self._values |= note.values
                (self.draft / _note_name(number)).unlink()
            missing -= there
            if missing and time.monotonic() > max(began, self._hurried) + self._patience:
                raise CheckpointError(
                    f"{self.draft} has no part of rank {min(missing)}: it was not written, or the hosts do not share the folder"
                )
            if missing and not there:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK_SECONDS)
        return found

    def _complete(self, files: dict[str, FileFacts]) -> None:
        """The first rank: the small files, the manifest last, then the rename."""
        small = {
            contents.FILE: contents_of(self.writer.tensors, self._values).encoded(),
            position.FILE: self.progress.to_json().encode(),
            **{name: text.encode() for name, text in self.attached.items()},
        }
        for name, text in small.items():
            files[name] = write_file(self.draft / name, [text])
        write_file(self.draft / manifest.FILE, [Manifest(files=dict(sorted(files.items()))).to_json().encode()])
        flush_folder(self.draft)
        self.publish(self.draft)


def words(error: BaseException) -> str:
    """The innermost cause: what the disk said is often wrapped in several layers."""
    cause = innermost(error)
    return str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"


def innermost(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else innermost(error.__cause__)


def is_of_disk(problem: str) -> bool:
    """Whether what `words` has said is the system's refusal, which may pass, and not an error of the program."""
    return re.search(rf"(^|: )({'|'.join(_REFUSALS)}): ", problem) is not None


_REFUSALS = (
    "OSError",
    *(
        kind.__name__
        for kind in OSError.__subclasses__()
        if kind.__module__ == "builtins" and kind is not ConnectionError
    ),
)


def _note_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"
