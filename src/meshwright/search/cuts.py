"""Where to cut a row of units into stages.

One stage a coordinate: dynamic programming over (stage, units before its end), which finds the least possible largest
                        weight of a stage                                                             -> _least_largest
    weight of stage i   what it adds to the played schedule beyond one microbatch through the model (search/bounds.py):
                        gpipe (m-1) (f+b);  1f1b (m-1) b + max(0, m-p+i) f;  zb m (f+b) - (p-i) f
                        b: with as much recompute as the stage needs to fit; no cut where none suffices  -> _Loads
Several stages a coordinate: start even, and take units from the busiest coordinate as long as that helps -> _levelled
Few cuts in all: every one                                                                            -> every_cut
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from math import comb

import numpy as np

from meshwright.core.placement import coordinate_of
from meshwright.core.plan import placement_of
from meshwright.search.in_flight import in_flight
from meshwright.search.room import Room
from meshwright.search.space import Point
from meshwright.search.units import Cut, least_size
from meshwright.search.work import Places, Row, UnitTable

AGAIN = ("selective", "full")
FEW_CUTS = 24
"""So many cuts are all looked at."""


def num_cuts(num_units: int, num_stages: int) -> int:
    return comb(num_units - 1, num_stages - 1)


def every_cut(num_units: int, num_stages: int) -> Iterator[Cut]:
    for ends in combinations(range(1, num_units), num_stages - 1):
        yield (*ends, num_units)


def best_cut(table: UnitTable, point: Point, room: Room) -> tuple[Cut, float] | None:
    """One good cut, with the largest weight of its stages where that is known; None where none fits, by what is known."""
    if point.num_stages == 1:
        return (table.num_units,), 0.0
    if point.virtual == 1:
        return _least_largest(_Loads(table, point, room), table.num_units, point.num_stages)
    return _levelled(table, point), 0.0


# ---------------------------------------------------------------- one stage a coordinate


@dataclass(frozen=True)
class _Rows:
    """Rows of units, many at once: what each takes and keeps as a stage, whichever stage that is."""

    forward: Row
    backward: Row
    held_bytes: Row
    """Whatever is in flight: state, and room for the unit that runs."""
    kept: Row
    saved: dict[str, Row]
    longer: dict[str, Row]
    """By mode of recompute: bytes of one microbatch it saves, seconds it adds."""


class _Loads:
    """The weight of every row of units as stage i."""

    def __init__(self, table: UnitTable, point: Point, room: Room) -> None:
        self.table, self.point, self.room = table, point, room
        shape = point.shape
        self.held = in_flight(point.schedule, shape.pp, shape.num_microbatches, 1)

    def rows(self, begins: Places, ends: Places) -> _Rows:
        table, room = self.table, self.room
        working = room.working_bytes(table)
        state = (table.elements[ends] - table.elements[begins]) * room.element_bytes
        state += (table.expert_elements[ends] - table.expert_elements[begins]) * room.expert_element_bytes
        running = np.maximum(working[begins], working[ends - 1])  # the units at the ends are the unlike ones
        plain, kept = table.backward(begins, ends), table.kept_by(begins, ends, "none")
        return _Rows(
            forward=table.forward(begins, ends),
            backward=plain,
            held_bytes=state + running,
            kept=kept,
            saved={mode: kept - table.kept_by(begins, ends, mode) for mode in AGAIN},
            longer={mode: table.backward(begins, ends, mode) - plain for mode in AGAIN},
        )

    def of(self, stage: int, rows: _Rows) -> Row:
        shape = self.point.shape
        m, p = shape.num_microbatches, shape.pp
        backward = rows.backward + self._again(stage, rows)
        match self.point.schedule:
            case "1f1b":
                return (m - 1) * backward + max(0, m - p + stage) * rows.forward
            case "zb":
                return m * (rows.forward + backward) - (p - stage) * rows.forward
            case _:
                return (m - 1 or 1) * (rows.forward + backward)

    def _again(self, stage: int, rows: _Rows) -> Row:
        """Seconds of the cheapest recompute that fits, taken as divisible; infinite where none does."""
        held = self.held[stage]
        over = rows.held_bytes + held * rows.kept - self.room.budget_bytes
        best = np.where(over <= 0, 0.0, np.inf)
        for mode in AGAIN:
            saved = held * rows.saved[mode]
            share = np.divide(over, saved, out=np.full_like(over, 2.0), where=saved > 0)
            best = np.where((share > 0) & (share <= 1), np.minimum(best, share * rows.longer[mode]), best)
        return best


def _least_largest(loads: _Loads, num_units: int, num_stages: int) -> tuple[Cut, float] | None:
    """Dynamic programming: best[e] of stage i = min over the begin b of max(best of stage i-1 at b, weight of b … e)."""
    longest = min(num_units - num_stages + 1, -(-num_units * 4 // (3 * num_stages)) + 3)
    ends: Places = np.arange(num_units + 1, dtype=np.int64)
    lengths: Places = np.arange(1, longest + 1, dtype=np.int64)
    begins = ends[None, :] - lengths[:, None]  # one row a length
    is_row = begins >= 0
    begins = np.where(is_row, begins, 0)
    until = np.where(is_row, ends[None, :], 1)
    rows = loads.rows(begins, until)
    best = np.where(ends == 0, 0.0, np.inf)
    choices: list[Places] = []
    for stage in range(num_stages):
        largest = np.where(is_row, np.maximum(best[begins], loads.of(stage, rows)), np.inf)
        shortest = np.argmin(largest, axis=0)  # of equal ones
        best = largest[shortest, ends]
        choices.append(lengths[shortest])
    if not np.isfinite(best[num_units]):
        return None
    cut = [num_units]
    for chosen in reversed(choices[1:]):
        cut.append(cut[-1] - int(chosen[cut[-1]]))
    return tuple(reversed(cut)), float(best[num_units])


# ---------------------------------------------------------------- several stages a coordinate


def _levelled(table: UnitTable, point: Point) -> Cut:
    """Even stages; then units go from the busiest coordinate to the least busy one as long as the busiest gets less."""
    size, larger = divmod(table.num_units, point.num_stages)
    counts = [size + (stage >= point.num_stages - larger) for stage in range(point.num_stages)]
    loads = _coordinate_loads(table, point, counts)
    for _ in range(table.num_units):
        busiest, idlest = int(np.argmax(loads)), int(np.argmin(loads))
        moved = _moved(point, counts, busiest, idlest)
        if moved is None or max(after := _coordinate_loads(table, point, moved)) >= max(loads):
            break
        counts, loads = moved, after
    return tuple(accumulate(counts))


def _moved(point: Point, counts: list[int], giver: int, taker: int) -> list[int] | None:
    placement, pp = placement_of(point.schedule), point.shape.pp
    least = least_size(sum(counts), point.num_stages)
    mine = [s for s in range(point.num_stages) if coordinate_of(s, pp, placement) == giver and counts[s] > least]
    theirs = [s for s in range(point.num_stages) if coordinate_of(s, pp, placement) == taker]
    if not mine or giver == taker:
        return None
    found = list(counts)
    found[max(mine, key=lambda stage: counts[stage])] -= 1
    found[min(theirs, key=lambda stage: counts[stage])] += 1
    return found


def _coordinate_loads(table: UnitTable, point: Point, counts: list[int]) -> list[float]:
    loads = [0.0] * point.shape.pp
    placement = placement_of(point.schedule)
    for stage, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        home = coordinate_of(stage, point.shape.pp, placement)
        loads[home] += float(table.forward(begin, end) + table.backward(begin, end))
    return loads
