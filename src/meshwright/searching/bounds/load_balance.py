"""How evenly work can be shared out over coordinates at best, for any cut: parts of the bounds (step_seconds.py)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache

import numpy as np

from meshwright.core.pipeline.kinds import ScheduleKind, kind_of
from meshwright.core.pipeline.placement import Placement
from meshwright.searching.unit_table import Row

ROUNDING = 1e-6
NEAR = 1e-4
"""A share of the seconds, to which the slowest stage is found."""


@lru_cache(maxsize=65536)
def waiting(schedule: ScheduleKind, p: int, m: int, first_share: float, share: float) -> tuple[float, float]:
    """The least weight c_i of a stage, and the sum of the inverse weights where all are above 0. first_share, share: the shares of
    its time that the first stage, and any other, spends in forward."""
    weigh = kind_of(schedule).stage_weight
    shares = [first_share, *[share] * (p - 1)]
    weights = [weigh(stage, p, m, share, 1.0 - share) for stage, share in enumerate(shares)]
    return min(weights), sum(1 / weight for weight in weights) if min(weights) > 0 else 0.0


def shared_out(total: float, least: float, inverses: float) -> float:
    """The least possible largest c_i · t_i with Σ t_i = total; 0 where the weight of some stage is 0."""
    return total / inverses if least > 0 else 0.0


def least_heaviest(work: Row, p: int, at_least: float = 0.0, boundaries: Row | None = None) -> float:
    """A lower bound on the slowest of p stages over all cuts: each stage is a row of units, and ends only where the boundary takes
    no longer either. `at_least` where that is more. No further than `NEAR` from the least possible.

    boundaries: seconds that a step takes at least where a stage ends behind this unit; the last one is the end of the model.
    """
    sums = np.cumsum(work)
    total = float(sums[-1])
    least, most = max(at_least, float(work.max()), total / p), max(at_least, total)
    if _hold_all(sums, boundaries, p, least):
        return least
    while most - least > NEAR * most:
        middle = (least + most) / 2
        if _hold_all(sums, boundaries, p, middle):
            most = middle
        else:
            least = middle
    return least


def _hold_all(sums: Row, boundaries: Row | None, p: int, seconds: float) -> bool:
    """Whether p stages of so many seconds hold all units, each filled as far as it goes. sums: over the first units."""
    limit, filled = seconds * (1 + ROUNDING), 0.0
    ends = (sums if boundaries is None else sums[boundaries <= limit]).tolist()
    place = 0
    for _ in range(p):
        place = bisect_right(ends, filled + limit, place)
        if place == len(ends):
            return True
        if place == 0 or ends[place - 1] <= filled:
            return False
        filled = ends[place - 1]
    return False


def least_busiest(work: Row, p: int, placement: Placement) -> float:
    """The first and the last unit lie on known coordinates; the others, each taken as the lightest of them, go wherever there is
    room. The least seconds that give all of them a place."""
    if len(work) < 3 or p == 1:
        return float(work.sum()) / p
    light, rest = float(work[1:-1].min()), len(work) - 2
    ends = [float(work[0]), float(work[-1])] if placement == "loop" else [float(work[0] + work[-1])]
    if light <= 0:
        return max(ends)

    def has_room(seconds: float) -> bool:
        room = sum(int((seconds - end) / light + ROUNDING) for end in ends if seconds >= end)
        room += (p - len(ends)) * int(seconds / light + ROUNDING)
        return seconds >= max(ends) * (1 - ROUNDING) and room >= rest

    # some coordinate is full: of light units alone, or beside an end
    loads = ([end + count * light for count in range(rest + 1)] for end in (0.0, *ends))
    filled = [row[place] for row in loads if (place := bisect_left(row, True, key=has_room)) < len(row)]
    return min(filled, default=max(ends))
