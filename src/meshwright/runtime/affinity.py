"""Which cores and how many threads a rank uses. No torch here: it must run before torch starts its threads."""

from __future__ import annotations

import os


def local_cores() -> list[int]:
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cores_of(local_rank: int, num_local_ranks: int) -> list[int]:
    """An equal, separate share for each rank; all cores where there are more ranks than cores."""
    cores = local_cores()
    share = len(cores) // num_local_ranks
    return cores[local_rank * share : (local_rank + 1) * share] if share else cores


def pin(local_rank: int, num_local_ranks: int) -> int:
    """Keep this rank on its own cores; returns how many threads it should use."""
    cores = cores_of(local_rank, num_local_ranks)
    if num_local_ranks <= len(local_cores()):
        os.sched_setaffinity(0, cores)
        return len(cores)
    return 1
