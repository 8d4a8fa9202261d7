"""When a run's checkpoints are written, and what becomes of the run when one cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from meshwright.core.errors import CheckpointError
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.train.position import Progress
from meshwright.train.saver import Saver
from meshwright.train.settings import CheckpointSettings

GRACE_SECONDS = 5.0
"""After an error, for a checkpoint that is under way: other ranks may never write their part."""


class Saving:
    def __init__(
        self,
        program: Program,
        folder: Path,
        rank: Rank,
        settings: CheckpointSettings,
        attached: Mapping[str, str],
        warn: Callable[[str], None],
    ) -> None:
        self.settings, self.warn = settings, warn
        self.saver = Saver(program, folder, rank, settings.keep, settings.asynchronous, attached)

    def on_the_way(self, progress: Progress) -> None:
        """It may fail and the run goes on: what is in memory is worth more."""
        self.settle()
        try:
            self.saver.begin(progress)
        except CheckpointError as error:
            self._warn(error)
        if not self.settings.asynchronous:
            self.settle()

    def last(self, progress: Progress) -> Path:
        """This one must not fail."""
        self.settle()
        return self.saver.save(progress)

    def close(self) -> None:
        """Also after an error, when other ranks may be gone."""
        self.saver.close(GRACE_SECONDS)

    def settle(self) -> None:
        """The one that is under way is whole, or was not to be."""
        try:
            self.saver.settle()
        except CheckpointError as error:
            self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        self.warn(f"warning: {error}. Training goes on; the next checkpoint will be tried again.")
