"""Going on after a fault: ranks are started again, as many as before or fewer, until they end well or the restarts are used up.

    ranks we start      each start is a launch of its own: between two of them nothing of the job is
                        left, so that the next may have other ranks and another plan        -> launch_with_restarts
    under torchrun      its agents start ranks again, on the hosts that are left; a rank knows by its launcher that the
                        run folder is of this same job, and goes on there                   -> launchers

Who starts ranks decides nothing: how the next start differs from the last is a callable it is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import RunError
from meshwright.core.run.fault import Fault
from meshwright.runtime.launch import launch
from meshwright.runtime.process import process_of


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks."""

    payload: dict[str, Any]
    num_ranks: int
    number: int = 0


Next = Callable[[Fault, Attempt], Attempt]
"""What was wrong, and the attempt it happened to → the attempt to make now."""


def launch_with_restarts(
    function: str, first: Attempt, num_restarts: int, next_attempt: Next, timeout_seconds: float = 0.0
) -> Any:
    """As `launch`; a fault that may pass starts the ranks again, at most so many times."""
    attempt, earlier = first, None
    while True:
        try:
            return launch(function, attempt.payload, attempt.num_ranks, timeout_seconds)
        except RunError as error:
            fault = error.fault
            if fault is None or not fault.may_pass or attempt.number == num_restarts:
                raise
            if fault.is_again(earlier):
                raise RunError(
                    f"{error}\n  the same error came back after a restart: it is not restarted again", fault
                ) from None
            attempt, earlier = next_attempt(fault, attempt), fault


def launcher() -> str:
    """The process that started this rank, by a name that no other process ever has."""
    found = process_of(os.getppid())
    return f"{found.host}:{found.number}:{found.started}"
