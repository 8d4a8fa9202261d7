"""The memory of this host: how much there is, and how much may still be taken. A container may be given less than the machine has.

Of a control group: limit (memory.max), in use (memory.current), and file pages that the kernel gives up first
(inactive_file of memory.stat).
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def physical_bytes() -> int:
    """The machine's memory, or the container's limit where that is lower."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _limit_of_container()
    return machine if limit is None else min(machine, limit)


def available_bytes() -> int | None:
    """What this process may still take; None where the system does not say."""
    found = [free for free in (_free_of_machine(), _free_of_container()) if free is not None]
    return min(found) if found else None


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
    return int(values["MemAvailable"]) * 1024 if "MemAvailable" in values else None


def _free_of_container() -> int | None:
    limit = _limit_of_container()
    if limit is None:
        return None
    try:
        used, statistics = (CGROUP / "memory.current").read_text(), (CGROUP / "memory.stat").read_text()
    except OSError:
        return None
    return limit - int(used) + _reclaimable(statistics)


def _limit_of_container() -> int | None:
    try:
        text = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(statistics: str) -> int:
    found = dict(line.split(maxsplit=1) for line in statistics.splitlines())
    return int(found.get("inactive_file", 0))
