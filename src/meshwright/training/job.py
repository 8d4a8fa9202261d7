"""A run as values: the Job it was told, and the Outcome it came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import CheckpointError
from meshwright.core.plan import Plan
from meshwright.core.run.trace import Trace
from meshwright.training.folder import RunFolder
from meshwright.training.optimizers import learning_rate
from meshwright.training.run_id import check_still_ours, new_id, write_id
from meshwright.training.settings import Settings


@dataclass(frozen=True)
class Job:
    """What a run was told: everything is decided by now."""

    settings: Settings
    plan: Plan
    folder: RunFolder
    resume: bool = False
    verify: bool = False
    """Whether a resumed run first replays a step and compares."""
    run: str = ""
    """Its id."""

    def keep_home(self) -> None:
        """Before something is written into the run folder: one that was removed is made anew, one of another run is not touched."""
        try:
            check_still_ours(self.folder.path, self.run)
        except CheckpointError as error:
            raise OSError(str(error)) from error
        if not self.folder.settings.exists():
            self.settings.save(self.folder.settings)
            self.plan.save(self.folder.plan)
            write_id(self.folder.path, self.run or new_id())

    def learning_rate(self, step: int) -> float:
        return learning_rate(step, self.settings.steps, self.settings.learning_rate)


@dataclass(frozen=True)
class Outcome:
    trace: Trace
    loss: float
    validation_loss: float | None
    num_steps: int
    stopped: str | None
    """Why it ended before its last step, if it did."""
    checkpoint: Path
