"""Errors a user may meet. Each message says what is wrong, where, and what to do.

The value errors are also `ValueError`s, so that a value can refuse itself while its file is being read and the codec
can add the path of the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.core.result import Infeasible
    from meshwright.core.run.fault import Fault


MOST_SHOWN = 120
"""Letters of what somebody gave, in a message about it."""


class MeshwrightError(Exception):
    """Base of everything Meshwright raises on purpose."""


class InputError(MeshwrightError, ValueError):
    """A file, flag or name that cannot be read as what it should be."""


class PlanError(MeshwrightError, ValueError):
    """A plan that contradicts itself, its model or the ranks it is to run on."""


class ScheduleError(MeshwrightError, ValueError):
    """A schedule that would deadlock, or does a unit of work twice or never."""


class ModelError(MeshwrightError):
    """A model that cannot be named, built or called."""


class CaptureError(MeshwrightError):
    """A module whose forward or backward could not be followed on fake tensors."""


class DiskError(MeshwrightError):
    """A file that training state lives in could not be read or written."""


class GuessWarning(UserWarning):
    """A graph that is not all of what the module does: it rests on a guess at a value, or leaves out the module's own recompute."""


class InfeasibleError(MeshwrightError):
    """No candidate fits the budget. The message names the nearest miss and what does not fit, and by how much."""

    def __init__(self, message: str, found: Infeasible | None = None) -> None:
        super().__init__(message)
        self.found = found
        """The nearest miss and the ways out, where a search looked for them."""


class RunError(MeshwrightError):
    """A run that ended before its time: the message names the rank and its error."""

    def __init__(self, message: str, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        """The fault and the rank it happened to, where they are known."""


class RefusedError(RunError):
    """A rank refused its model or plan: the message says what, where and what to do, as before ranks start."""


class FailsUnderPlanError(RunError):
    """The model runs in one process, and raises an error of its own under a plan that nothing refused: a fault, not a refusal."""


class HangError(RunError):
    """Some rank hangs. The message, the same on all ranks, says which, where, and what the others wait in."""


class OutOfMemoryError(RunError):
    """A rank that got no more memory. The message says what was in use by category, and what would need less."""


class CorruptionError(RunError):
    """Ranks that must hold the same parameters do not. The message names the odd rank and the parameter."""


class CheckpointError(MeshwrightError):
    """A checkpoint that could not be written or read; an older one is never touched."""


def shortened(text: str) -> str:
    """A text that somebody gave, as far as a message needs it."""
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint naming the closest valid word whatever its case, or all of them when none is close."""
    name, words = name[:MOST_SHOWN], sorted(set(valid))
    folded = {word.casefold(): word for word in words}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{folded[close[0]]}'?"
    return f"valid here: {', '.join(words)}" if words else "nothing is valid here"


def check_number(name: str, value: object, least: int = 1) -> None:
    """A number that a caller gave, or left out (None): whole and not too small, whichever face it came through."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}: give a whole number, {least} or more")


def check_choice(flag: str, value: str, valid: Iterable[str]) -> None:
    """A flag or keyword with a fixed set of words."""
    if value not in (words := tuple(valid)):
        raise InputError(f"{flag} {value}: {nearest(value, words)}")
