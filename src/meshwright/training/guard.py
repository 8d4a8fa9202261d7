"""A Guard judges every loss: is it a number, is it far above those before it, and what is to be done then.

    spike      loss > m + (k - 1) |m|      m: median of the last 50 good losses, once there are 20; k: faults.spike

For losses above zero that is k · m. The same losses give the same answer on every rank.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import InputError, RunError
from meshwright.core.plan import Plan
from meshwright.runtime.gate import Gate
from meshwright.runtime.program import Program
from meshwright.training.settings import FaultSettings

WINDOW = 50
LEAST_HISTORY = 20
MOST_SKIPS = 10
"""Updates left out in a row: past that the run does not learn any more."""
MOST_ROLLBACKS = 3
"""To one and the same checkpoint."""

Answer = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True)
class Trouble:
    """A loss that is not good, and what the settings say to it."""

    answer: Answer
    words: str


class Guard:
    """Judges every loss of a loop of one's own, as `meshwright train` does: is it a number, is it far above those before it?

    guard = mw.Guard(mw.FaultSettings(on_nan="stop", on_spike="skip", spike=3.0))
    if found := guard.trouble(loss):
        ...                          # found.answer: "stop", "skip" or "rollback"; found.words says why
    else:
        guard.accept(loss)
    """

    def __init__(self, settings: FaultSettings) -> None:
        self.settings = settings
        self._good: deque[float] = deque(maxlen=WINDOW)
        self._num_skips = 0
        self._rollbacks: dict[int, int] = {}

    @property
    def skips(self) -> bool:
        """Whether an update may be left out: then each has to wait for its loss."""
        return "skip" in (self.settings.on_nan, self.settings.on_spike)

    @property
    def ranks_must_agree(self) -> bool:
        """Ranks that divide a tensor may see a loss that differs in its last digit, on two sides of a bound."""
        return self.settings.on_spike != "ignore" or self.settings.on_nan == "rollback"

    def trouble(self, loss: float) -> Trouble | None:
        """What is wrong with a loss, and what the settings answer; None for a good one."""
        if not math.isfinite(loss):
            return Trouble(self.settings.on_nan, f"the loss is {loss}")
        if self.settings.on_spike == "ignore" or loss <= (bound := self._bound()):
            return None
        return Trouble(
            self.settings.on_spike,
            f"the loss is {loss:.4g}, above the bound of {bound:.4g} ({self.settings.spike:g} times the median of late)",
        )

    def may_learn(self, loss: float) -> bool:
        """Before an update: False where it is to be left out."""
        found = self.trouble(loss)
        return found is None or found.answer != "skip"

    def accept(self, loss: float) -> None:
        """Take a good loss into the median that the next ones are compared with."""
        self._good.append(loss)
        self._num_skips = 0

    def note_skip(self, step: int, words: str) -> None:
        """An update was left out. Too many in a row end the run."""
        self._num_skips += 1
        if self._num_skips > MOST_SKIPS:
            raise RunError(
                f"{words} at step {step}, and {MOST_SKIPS} updates before it were left out for the like: lower "
                "learning_rate.peak, check the data, or rerun with --find-nan"
            )

    def note_rollback(self, step: int, words: str) -> None:
        """The run goes back to the checkpoint of a step. Too often to the same one ends the run."""
        self._rollbacks[step] = self._rollbacks.get(step, 0) + 1
        self._good.clear()
        if self._rollbacks[step] > MOST_ROLLBACKS:
            raise RunError(
                f"{words}, and the run was rolled back {MOST_ROLLBACKS} times to the checkpoint of step {step} already, each time "
                "on other data: lower learning_rate.peak, or resume from an older checkpoint"
            )

    def _bound(self) -> float:
        if len(self._good) < LEAST_HISTORY:
            return math.inf
        median = statistics.median(self._good)
        return median + (self.settings.spike - 1) * abs(median)


def make_gate(guard: Guard, plan: Plan, program: Program) -> Gate | None:
    """What keeps bad updates back, where the settings say to leave them out."""
    if not guard.skips:
        return None
    if plan.offload.what == "parameters" or (program.host is not None and program.host.leaves_early):
        raise InputError(
            'faults.on_nan or faults.on_spike is "skip", but with this offload gradients are used as soon as they are made: use '
            '"rollback" or "stop"'
        )
    return Gate(guard.may_learn, looks_at_gradients=guard.settings.on_nan == "skip" and program.loss_scale is None)
