"""A run as values: the Job it was told, and the Outcome it came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.core.plan import Plan
from meshwright.core.trace import Trace
from meshwright.train.folder import RunFolder
from meshwright.train.optimizers import learning_rate
from meshwright.train.settings import Settings


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
