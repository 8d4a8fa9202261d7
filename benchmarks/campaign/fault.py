"""A fault that was put upon a run, and what became of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from campaign.scene import Scene


class Outcome(StrEnum):
    MISSED = "missed"
    """There was nothing to break, or the run was at its end: it is drawn again."""
    RECOVERED = "recovered"
    """The run went on, by itself or by --resume. It counts when the whole run is found to be right in the end."""
    ENDED = "ended"
    """The run could not go on: it said so, and what it had saved is whole."""


class ProblemError(Exception):
    """What a run did that it must not do."""


@dataclass
class Fault:
    plan: str
    kind: str
    detail: str
    outcome: Outcome
    seconds: float
    """Until the run had noticed it, or was through with it."""
    is_right: bool = False
    """Whether its run has passed."""


@dataclass(frozen=True)
class Put:
    """How a fault was put: what became of it, and which of its ways it was."""

    outcome: Outcome
    detail: str = ""


MISSED = Put(Outcome.MISSED)
Kind = Callable[[Scene, random.Random], Put]
