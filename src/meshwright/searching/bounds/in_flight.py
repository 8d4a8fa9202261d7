"""How many stages' worth of microbatches a schedule keeps at most, by coordinate."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from meshwright.core.plan import ScheduleKind
from meshwright.rules.schedules import make_order

_CHANGES = {"forward": 1, "backward": -1, "backward_weights": -1}


@lru_cache(maxsize=4096)
def in_flight(schedule: ScheduleKind, pp: int, num_microbatches: int, virtual: int) -> tuple[int, ...]:
    if schedule == "1f1b":
        return tuple(min(num_microbatches, pp - coordinate) for coordinate in range(pp))
    if schedule == "gpipe":
        return (num_microbatches,) * pp
    if schedule == "zb":
        return (min(num_microbatches, pp),) * pp
    enough = min(num_microbatches, 3 * pp)  # by then the pipeline is full
    rows = make_order(schedule, pp, enough, virtual)
    return tuple(max(accumulate(_CHANGES.get(action.kind, 0) for action in row)) for row in rows)
