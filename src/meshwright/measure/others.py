"""What other programs take of the cores we may run on, and other machines of the hardware below us: a measurement beside them is
not one of this machine.

    share = (busy seconds of our cores - processor seconds of this process and its children) / (cores · seconds)

Busy seconds are the kernel's, with those that a virtual machine was kept from running ("steal"). Only Linux tells.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

BUSY_SHARE = 0.15
"""From here on a measurement is one of a busy machine."""
SAMPLE_SECONDS = 0.3
STAT = Path("/proc/stat")
IDLE = (3, 4)
"""Columns of the kernel's table in which nobody ran: idle, and waiting for a disk."""
COUNTED = 8
"""Columns after these are counted in others already."""


class Others:
    """Begins to watch when it is made."""

    def __init__(self) -> None:
        self._cores = _own_cores()
        self._began = time.monotonic(), _busy_seconds(self._cores), _own_seconds()

    def share(self) -> float:
        """Of the cores' time since then; children count when they have ended. 0 where the system does not tell."""
        now = time.monotonic(), _busy_seconds(self._cores), _own_seconds()
        elapsed, busy, own = (after - before for after, before in zip(now, self._began, strict=True))
        if elapsed <= 0 or not self._cores:
            return 0.0
        return min(1.0, max(0.0, (busy - own) / (elapsed * len(self._cores))))


def share_now() -> float:
    """Watched for a moment."""
    others = Others()
    time.sleep(SAMPLE_SECONDS)
    return others.share()


def _own_cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if STAT.exists() and hasattr(os, "sched_getaffinity") else frozenset()


def _busy_seconds(cores: frozenset[int]) -> float:
    if not cores:
        return 0.0
    rows = (line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu"))
    mine = (columns for name, *columns in rows if name[3:].isdigit() and int(name[3:]) in cores)
    ticks = sum(int(count) for columns in mine for place, count in enumerate(columns[:COUNTED]) if place not in IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
