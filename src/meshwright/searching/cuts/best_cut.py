"""Where to cut a row of units into stages.

One stage a coordinate: dynamic programming over (stage, units before its end), which finds the least possible largest
                        weight of a stage                                                             -> _least_largest
    weight of stage i   what it adds to the played schedule beyond one microbatch through the model (bounds/step_seconds.py):
                        gpipe (m-1) (f+b);  1f1b (m-1) b + max(0, m-p+i) f;  zb m (f+b) - (p-i) f
                        b: with as much recompute as the stage needs to fit at least; no cut where none suffices -> StageLoads
                        no less than the messages of m-1 microbatches to the next stage, one after the other; nor than its own work,
                        gathers and reductions, from when the first microbatch reaches it                    -> Bounds.busy
Several stages a coordinate: some that are even in one way or another, and their neighbours, played; even coordinates where
                             some must recompute                                                      -> played_cuts.py
Few units: all cuts                                                                                  -> ranked_cuts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from meshwright.core.pipeline.kinds import kind_of
from meshwright.searching.bounds.by_coordinate import least_of_any_cut
from meshwright.searching.bounds.memory import Room
from meshwright.searching.bounds.step_seconds import Bounds
from meshwright.searching.cuts.played_cuts import levelled_cut, played_cut
from meshwright.searching.recompute_curve import cheapest_recompute
from meshwright.searching.unit_table import Places, Row, UnitTable
from meshwright.searching.units import Cut

AGAIN = ("selective", "full")


def best_cut(bounds: Bounds, room: Room) -> tuple[Cut, float] | None:
    """One good cut, and seconds that no cut is faster than; None where no cut fits."""
    point, table = room.point, bounds.table
    if point.num_stages == 1:
        return (table.num_units,), 0.0
    if point.virtual == 1:
        found = _least_largest(StageLoads(bounds, room), table.num_units, point.num_stages)
        return None if found is None else (found[0], bounds.with_heaviest(point, found[1]))
    least = least_of_any_cut(bounds, room)
    return None if least == inf else (cut_of_several(table, room), least)


def cut_of_several(table: UnitTable, room: Room) -> Cut:
    """Several stages a coordinate: one good cut."""
    levelled = levelled_cut(table, room.point)
    if room.recompute_seconds > 0:  # by which stages differ as no play knows before it is decided
        return levelled
    played = played_cut(table, room.point)
    return played if room.cut_fits(played) else levelled


# ---------------------------------------------------------------- one stage a coordinate


@dataclass(frozen=True)
class _Rows:
    """Rows of units, many at once: what each takes and keeps as a stage, whichever stage that is."""

    forward: Row
    backward: Row
    at_end: Row
    """Bytes beside all that is kept: state, and room for the last unit, which runs when most is kept."""
    at_begin: Row
    """Bytes beside what the other microbatches keep: state, and the first unit, which runs when its own has kept nothing else."""
    kept: Row
    saved: dict[str, Row]
    longer: dict[str, Row]
    """By mode of recompute: bytes of one microbatch it saves, seconds it adds."""
    hop: Row
    """Seconds of the message to the next stage."""
    busy: list[tuple[Row, int]]
    """Seconds of a step until a stage has done all its work and its own gathers and reductions, beyond what every step has; and
    for how many microbatches a recompute adds to them."""


class StageLoads:
    """The weight of every row of units as stage i."""

    def __init__(self, bounds: Bounds, room: Room) -> None:
        point = room.point
        self.table, self.point, self.room, self.hops = bounds.table, point, room, bounds.hops(point.shape)
        self.busy = bounds.busy(point)
        self.held = point.in_flight

    def rows(self, begins: Places, ends: Places) -> _Rows:
        table, room = self.table, self.room
        working = room.working.by_unit
        state = room.bytes_of(begins, ends)
        plain, kept = table.backward(begins, ends), table.kept_by(begins, ends, "none")
        return _Rows(
            forward=table.forward(begins, ends),
            backward=plain,
            at_end=state + np.where(ends - begins > 1, room.inside[ends - 1], working[ends - 1]),
            at_begin=state + working[begins] + table.unit_kept[begins],
            kept=kept,
            saved={mode: kept - table.kept_by(begins, ends, mode) for mode in AGAIN},
            longer={mode: table.backward(begins, ends, mode) - plain for mode in AGAIN},
            hop=self.hops[ends - 1],
            busy=[(self._busy(row, begins, ends), times) for row, times in self.busy.rows],
        )

    def _busy(self, row: Row, begins: Places, ends: Places) -> Row:
        """A stage begins when the first microbatch has gone through all before it."""
        return np.asarray(self.table.forward(0, begins) + row[ends] - row[begins] - self.busy.beyond_seconds)

    def of(self, stage: int, rows: _Rows) -> Row:
        link = (self.point.shape.num_microbatches - 1) * rows.hop
        again = self.again(stage, rows)
        weight = np.maximum(link, self._weight(stage, rows.forward, rows.backward + again))
        for seconds, times in rows.busy:
            weight = np.maximum(weight, seconds + (times * again if times else 0.0))
        return weight

    def _weight(self, stage: int, forward: Row, backward: Row) -> Row:
        shape = self.point.shape
        m, p = shape.num_microbatches, shape.pp
        weight = kind_of(self.point.schedule).stage_weight
        # infinite even with one microbatch, whose backward may weigh nothing
        return np.where(
            np.isinf(backward), inf, weight(stage, p, m, forward, np.where(np.isinf(backward), 0.0, backward))
        )

    def least_of_length(self, length: int, num_units: int, num_stages: int) -> float:
        """No stage of so many units or more weighs less, whatever it recomputes."""
        begins: Places = np.arange(num_units - length + 1, dtype=np.int64)
        work = self.table.forward(begins, begins + length), self.table.backward(begins, begins + length)
        return min(float(self._weight(stage, *work).min()) for stage in range(num_stages))

    def again(self, stage: int, rows: _Rows) -> Row:
        """Seconds of the cheapest recompute that fits, taken as divisible; infinite where none does."""
        held = self.held[stage]
        needed = np.maximum(rows.at_end + held * rows.kept, rows.at_begin + (held - 1) * rows.kept)
        over = needed - self.room.budget_bytes
        saved = {mode: held * rows.saved[mode] for mode in AGAIN}
        return np.where(over <= 0, 0.0, cheapest_recompute(over, saved, rows.longer))


def _least_largest(loads: StageLoads, num_units: int, num_stages: int) -> tuple[Cut, float] | None:
    """Short stages first: longer ones are looked at only where one of them may be lighter than the heaviest that was found."""
    most = num_units - num_stages + 1
    few = min(most, -(-num_units * 4 // (3 * num_stages)) + 3)
    found = _of_lengths(loads, num_units, num_stages, few)
    if few == most or (found is not None and loads.least_of_length(few + 1, num_units, num_stages) >= found[1]):
        return found
    return _of_lengths(loads, num_units, num_stages, most)


def _of_lengths(loads: StageLoads, num_units: int, num_stages: int, longest: int) -> tuple[Cut, float] | None:
    """Dynamic programming: best[e] of stage i = min over the begin b of max(best of stage i-1 at b, weight of b … e)."""
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
