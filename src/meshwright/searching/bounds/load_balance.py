"""How evenly work can be shared out over coordinates at best, wherever stages end: parts of the bounds (step_seconds.py)."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from meshwright.core.pipeline.kinds import ScheduleKind, kind_of
from meshwright.core.pipeline.placement import Placement
from meshwright.searching.unit_table import Row

ROUNDING = 1e-6


@lru_cache(maxsize=65536)
def waiting(schedule: ScheduleKind, p: int, m: int, first_share: float, share: float) -> tuple[float, float]:
    """The least weight c_i of a stage, and the sum of their inverses where all are above 0. The shares are those of seconds in
    forward, of the first stage and of all others."""
    weigh = kind_of(schedule).stage_weight
    shares = [first_share, *[share] * (p - 1)]
    weights = [weigh(stage, p, m, share, 1.0 - share) for stage, share in enumerate(shares)]
    return min(weights), sum(1 / weight for weight in weights) if min(weights) > 0 else 0.0


def shared_out(total: float, least: float, inverses: float) -> float:
    """The least possible largest c_i · t_i with Σ t_i = total; nothing where some stage could take all for free."""
    return total / inverses if least > 0 else 0.0


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
