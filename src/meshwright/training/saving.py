"""When a run's checkpoints are written, where, and what becomes of the run when one cannot be.

    on the way       at home; where the disk does not take it, elsewhere, if the settings name a place; else again after 1, 2, 4 …
                     further steps
    the last one     the same, and again and again: a run that has ended is not thrown away for a full disk

One checkpoint is under way at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import CheckpointError
from meshwright.core.units import format_duration
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.training.position import Progress
from meshwright.training.saver import Saver, UnwrittenError
from meshwright.training.settings import CheckpointSettings

GRACE_SECONDS = 5.0
"""After an error, for a checkpoint that is under way: other ranks may never write their part."""
STOPPED_SECONDS = 540.0
"""How long a run waits that was told to stop: its launcher ends the ranks a minute later."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0
"""Between two attempts at the last checkpoint: at first, and after many."""


@dataclass(frozen=True)
class Home:
    """Where checkpoints belong, and where they go when it does not take them."""

    folder: Path
    elsewhere: Path | None = None
    prepare: Callable[[], None] = lambda: None
    """Called on the first rank before something is written into `folder`: it may have been moved, removed or taken."""


class Saving:
    def __init__(
        self,
        program: Program,
        home: Home,
        rank: Rank,
        settings: CheckpointSettings,
        attached: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.settings, self.say, self.home = settings, say, home
        self.saver = Saver(program, home.folder, rank, settings.keep, settings.asynchronous, attached, home.prepare)
        self._again: int | None = None
        """The step before which a checkpoint that failed is tried again."""
        self._gap = 1
        self.other: Saver | None = None
        """Waits for its disk: a second copy of the state in host memory may not fit."""
        if home.elsewhere is not None:
            self.other = Saver(program, home.elsewhere, rank, settings.keep, asynchronous=False, attached=attached)

    def on_the_way(self, progress: Progress) -> None:
        """It may fail and the run goes on: what is in memory is worth more."""
        self.settle()
        try:
            self.saver.begin(progress)
            self._again, self._gap = None, 1
        except CheckpointError as error:
            self._again, self._gap = progress.step + self._gap, 2 * self._gap
            self._on_the_way_elsewhere(progress, error)
        if not self.settings.asynchronous:
            self.settle()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint that failed is to be tried again before that step; the same on all ranks."""
        return self._again is not None and step >= self._again

    def last(self, progress: Progress, num_signals: Callable[[], int] = lambda: 0) -> Path:
        """Tried until it is written, the time to wait is up, or a person does not want to wait. num_signals: that told this rank
        to stop, so far."""
        self.settle()
        pause, signals, said = PAUSE_SECONDS, num_signals(), ""
        wait_seconds = min(self.settings.wait_seconds, STOPPED_SECONDS) if signals else self.settings.wait_seconds
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                return self._anywhere(progress)
            except UnwrittenError as error:
                gives_up = time.monotonic() >= deadline or num_signals() > signals
                if any(all_ranks(gives_up, bool)):
                    self.say(f"the last checkpoint is given up: {error}")
                    raise
                if str(error) != said:
                    said = str(error)
                    self.say(self._waiting(said, wait_seconds))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def close(self) -> None:
        """Also after an error, when other ranks may be gone."""
        self.saver.close(GRACE_SECONDS)

    def settle(self) -> None:
        """The one that is under way is whole, or was not to be."""
        try:
            self.saver.settle()
        except CheckpointError as error:
            self._warn(error)

    def _anywhere(self, progress: Progress) -> Path:
        try:
            return self.saver.save(progress)
        except UnwrittenError as error:
            if self.other is None:
                raise
            return self._elsewhere(self.other, progress, error)

    def _on_the_way_elsewhere(self, progress: Progress, error: CheckpointError) -> None:
        if self.other is None or not isinstance(error, UnwrittenError):
            self._warn(error)
            return
        try:
            self._elsewhere(self.other, progress, error)
            self._again = None
        except CheckpointError as both:
            self._warn(both)

    def _elsewhere(self, other: Saver, progress: Progress, error: UnwrittenError) -> Path:
        try:
            path = other.save(progress)
        except UnwrittenError as again:
            raise UnwrittenError(f"{error}; nor elsewhere: {again}") from again
        self.say(f"warning: {error}. It is in {path} instead; --resume finds it there.")
        return path

    def _warn(self, error: CheckpointError) -> None:
        self.say(f"warning: {error}. Training goes on, and it will be tried again.")

    def _waiting(self, said: str, wait_seconds: float) -> str:
        more = "" if self.other is not None else ", or give the next run a second place (checkpoint.elsewhere)"
        return (
            "the run has ended, and waits for a disk that takes its last checkpoint, up to "
            f"{format_duration(wait_seconds)}: {said}. "
            f"Make room there, or put the folder back or right{more}; Ctrl-C gives the last steps up."
        )
