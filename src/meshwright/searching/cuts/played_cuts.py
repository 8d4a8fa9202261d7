"""Where to cut a row of units into several stages a coordinate.

How long such a cut takes depends on the whole schedule: one slow stage may hold up all coordinates in every microbatch, even where
all coordinates have the same work. So cuts are played (cost/play.py), with the seconds of the table of units:

    starts       coordinates level, stages level, stages level with the last unit alone, and all that is more than a unit a stage on
                 the first stages of the coordinates that have least                                          -> _starts
    neighbours   of the quickest: a unit from a slow stage to a quick one, as long as that is quicker        -> _neighbours
    number       of cuts that are played: so few that playing takes only a part of the time of an estimate   -> _Played.most
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from meshwright.cost.play import play_schedule
from meshwright.cost.timing import StageSeconds
from meshwright.searching.space import Point
from meshwright.searching.unit_table import UnitTable
from meshwright.searching.units import Cut

FULL_PIPELINES = 4
"""This many microbatches for each coordinate show which cut is faster: no more are played."""
MOST_ACTIONS, FEWEST_PLAYS, MOST_PLAYS = 40_000, 6, 80
"""Actions that are played for one point, within these numbers of plays."""
SAME = 1e-9

Counts = tuple[int, ...]
"""Units of each stage."""


def played_cut(table: UnitTable, point: Point) -> Cut:
    """The quickest cut that was played. It does not depend on the state, so it is found once for all states."""
    key = (point.schedule, point.virtual, point.shape.pp, point.shape.num_microbatches)
    known = table.known_cuts
    if key not in known:
        known[key] = tuple(accumulate(_quickest(_Played(table, point), table, point)))
    return known[key]


def levelled_cut(table: UnitTable, point: Point) -> Cut:
    return tuple(accumulate(_levelled(table, point)))


class _Played:
    """Seconds of cuts, each played once."""

    def __init__(self, table: UnitTable, point: Point) -> None:
        self.table, self.point = table, point
        shape = point.shape
        enough = FULL_PIPELINES * shape.pp
        self.num_microbatches = min(shape.num_microbatches, enough + shape.num_microbatches % shape.pp)
        self.known: dict[Counts, float] = {}
        actions = 3 * point.num_stages * self.num_microbatches
        self.most = min(MOST_PLAYS, max(FEWEST_PLAYS, MOST_ACTIONS // actions))

    @property
    def has_enough(self) -> bool:
        return len(self.known) >= self.most

    def seconds(self, counts: Counts) -> float:
        if counts not in self.known:
            stages = [self._stage(begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]
            point = self.point
            played = play_schedule(point.schedule, point.shape.pp, self.num_microbatches, point.virtual, stages)
            self.known[counts] = played.step_seconds
        return self.known[counts]

    def _stage(self, begin: int, end: int) -> StageSeconds:
        table = self.table
        backward = float(table.backward(begin, end))
        weights = min(backward, float(table.weights[end] - table.weights[begin]))
        return StageSeconds(forward=float(table.forward(begin, end)), backward=backward, weights=weights)


def _quickest(played: _Played, table: UnitTable, point: Point) -> Counts:
    """The best cut that a descent finds, from the quickest start first."""
    found = []
    for counts in sorted(dict.fromkeys(_starts(table, point)), key=played.seconds):
        found.append(_descended(played, table, counts))
        if played.has_enough:
            break
    return min(found, key=played.seconds)


def _descended(played: _Played, table: UnitTable, counts: Counts) -> Counts:
    while True:
        limit = played.seconds(counts) * (1 - SAME)
        better = next((one for one in _neighbours(table, counts, played) if played.seconds(one) < limit), None)
        if better is None:
            return counts
        counts = better


def _neighbours(table: UnitTable, counts: Counts, played: _Played) -> Iterator[Counts]:
    """Cuts with one unit moved: from the slowest stages to the quickest first. None where enough cuts were played."""
    times = [_work(table, begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]
    slowest = sorted(range(len(counts)), key=lambda stage: -times[stage])
    for giver in slowest:
        for taker in reversed(slowest):
            if counts[giver] > 1 and giver != taker and not played.has_enough:
                yield _moved(counts, giver, taker)


def _moved(counts: Counts, giver: int, taker: int) -> Counts:
    found = list(counts)
    found[giver] -= 1
    found[taker] += 1
    return tuple(found)


# ---------------------------------------------------------------- starts


def _starts(table: UnitTable, point: Point) -> Iterator[Counts]:
    yield _levelled(table, point)
    num_units, num_stages = table.num_units, point.num_stages
    yield _level_stages(table, num_units, num_stages)
    if num_units > num_stages:
        yield (*_level_stages(table, num_units - 1, num_stages - 1), 1)
    yield _front_heavy(table, point)


def _levelled(table: UnitTable, point: Point) -> Counts:
    """Even stages; then units go from the busiest coordinate to the least busy one as long as the loads become more even."""
    size, larger = divmod(table.num_units, point.num_stages)
    counts = tuple(size + (stage >= point.num_stages - larger) for stage in range(point.num_stages))
    loads = _loads(table, point, counts)
    for _ in range(table.num_units):
        better = _more_even(table, point, counts, loads)
        if better is None:
            break
        counts, loads = better
    return counts


def _more_even(table: UnitTable, point: Point, counts: Counts, loads: list[float]) -> tuple[Counts, list[float]] | None:
    """The busiest coordinate that can gives a unit to the least busy one; None where that makes nothing more even."""
    idlest = loads.index(min(loads))
    for giver in sorted(range(len(loads)), key=lambda place: -loads[place]):
        mine = [stage for stage in _stages_of(point, giver) if counts[stage] > 1]
        if mine and giver != idlest:
            most = max(mine, key=counts.__getitem__)
            fewest = min(_stages_of(point, idlest), key=counts.__getitem__)
            moved = _moved(counts, most, fewest)
            after = _loads(table, point, moved)
            return (moved, after) if sorted(after, reverse=True) < sorted(loads, reverse=True) else None
    return None


def _level_stages(table: UnitTable, num_units: int, num_stages: int) -> Counts:
    """The least largest stage: the limit is halved between what fits and what does not, and stages are filled up to it."""
    low, high = 0.0, _work(table, 0, num_units)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(table, num_units, num_stages, middle) else (middle, high)
    found = _filled(table, num_units, num_stages, high)
    assert found is not None
    return found


def _filled(table: UnitTable, num_units: int, num_stages: int, limit: float) -> Counts | None:
    """Stages from the end on, each with as many units as stay within the limit; None where some are left."""
    counts: list[int] = []
    end = num_units
    for left in range(num_stages - 1, -1, -1):
        begin = end - 1
        while begin > left and _work(table, begin - 1, end) <= limit:
            begin -= 1
        if _work(table, begin, end) > limit:
            return None
        counts.append(end - begin)
        end = begin
    return tuple(reversed(counts)) if end == 0 else None


def _front_heavy(table: UnitTable, point: Point) -> Counts:
    """A unit a stage; each of the rest to the first stage of the coordinate that has least."""
    counts: Counts = (1,) * point.num_stages
    firsts = [_stages_of(point, coordinate)[0] for coordinate in range(point.shape.pp)]
    for _ in range(table.num_units - point.num_stages):
        loads = _loads(table, point, counts)
        taker = firsts[loads.index(min(loads))]
        counts = (*counts[:taker], counts[taker] + 1, *counts[taker + 1 :])
    return counts


def _loads(table: UnitTable, point: Point, counts: Counts) -> list[float]:
    """Seconds of each coordinate; units behind the last stage's are left out."""
    loads = [0.0] * point.shape.pp
    missing = table.num_units - sum(counts)
    begins = list(accumulate(counts, initial=0))
    for stage, (count, home) in enumerate(zip(counts, point.homes, strict=True)):
        begin = begins[stage] + (missing if stage == len(counts) - 1 else 0)
        loads[home] += _work(table, begin, begin + count)
    return loads


def _stages_of(point: Point, coordinate: int) -> Sequence[int]:
    return [stage for stage, home in enumerate(point.homes) if home == coordinate]


def _work(table: UnitTable, begin: int, end: int) -> float:
    """Seconds of a row of units, as if each unit was a stage."""
    return table.unit_sums[end] - table.unit_sums[begin]
