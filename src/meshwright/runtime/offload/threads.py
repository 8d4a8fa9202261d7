"""Threads of the host that update beside those that drive the device: how many, and how they share Python's interpreter."""

from __future__ import annotations

import os
import sys
from weakref import finalize

import torch.distributed as dist

CORES_LEFT = 2
"""Cores that the updates leave to the threads that drive the device."""
SWITCH_SECONDS = 5e-4
"""How long a thread may keep Python's interpreter from one that waits for it: updates come back for it many times a step."""


def num_threads(num_ranks_here: int) -> int:
    """Of the updates of one rank."""
    return max(1, (len(os.sched_getaffinity(0)) - CORES_LEFT) // num_ranks_here)


def ranks_here() -> int:
    """As whoever started the ranks says; without a word, all are here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


class QuickTurns:
    """Threads take turns with the interpreter more often, until all of these are closed."""

    _num_open = 0
    _usual = 0.0

    def __init__(self) -> None:
        if QuickTurns._num_open == 0:
            QuickTurns._usual = sys.getswitchinterval()
            sys.setswitchinterval(min(QuickTurns._usual, SWITCH_SECONDS))
        QuickTurns._num_open += 1
        self.close = finalize(self, QuickTurns._end)

    @staticmethod
    def _end() -> None:
        QuickTurns._num_open -= 1
        if QuickTurns._num_open == 0:
            sys.setswitchinterval(QuickTurns._usual)
