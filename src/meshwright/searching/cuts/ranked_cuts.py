"""All cuts of a model with few units, those with the least lower bound first.

1. bounds of all cuts, whatever the state of the point (ZeRO, groups, offload): found once for all states     -> StatelessCuts
2. some at a time, the cuts that may fit, with what is known of the state. What is left is played             -> RankedCuts
3. the search costs them one by one, until none is left that may be faster than its best plan
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import chain
from math import inf

import numpy as np

from meshwright.searching.bounds.memory import Room
from meshwright.searching.bounds.step_seconds import Bounds
from meshwright.searching.cuts.stages_of_cuts import plain_stages, stages_in
from meshwright.searching.space import Point
from meshwright.searching.unit_table import Places, Row
from meshwright.searching.units import RANKED_UNITS, Cut, every_cut, num_cuts

MOST_CUTS = 25_000
"""Models with more units or cuts are cut in the ways of best_cut.py."""
FIRST, AT_ONCE, PLAYED_AT_ONCE = 64, 512, 64
"""Cuts that are looked at together, to begin with and later, and that are played with their state together."""


def can_rank(num_units: int, num_stages: int) -> bool:
    return num_units <= RANKED_UNITS and num_cuts(num_units, num_stages) <= MOST_CUTS


class RankedCuts:
    """The cuts of one point. What is known of them grows step by step, from whichever has the least bound so far."""

    def __init__(self, bounds: Bounds, room: Room) -> None:
        self.bounds, self.room = bounds, room
        self.stateless = _stateless_cuts(bounds, room.point)
        self._num_looked_at = 0
        self._waiting: list[tuple[float, bool, int]] = []
        """Lower bound, whether it is that of a play with the state, and place of each cut that was looked at; a heap."""

    @property
    def least_seconds(self) -> float:
        """No cut that was not taken is faster; infinite where none is left."""
        return min(self._next_seconds, self._waiting[0][0] if self._waiting else inf)

    @property
    def _next_seconds(self) -> float:
        seconds = self.stateless.seconds
        return float(seconds[self._num_looked_at]) if self._num_looked_at < len(seconds) else inf

    def step(self, limit_seconds: float, *, must_fit: bool) -> tuple[Cut, float] | None:
        """One step further: the best cut with its lower bound, or None, after which more is known of some cuts. Cuts that are not
        faster than the limit are dropped."""
        if self._next_seconds <= self.least_seconds:
            self._look_at_more(limit_seconds, must_fit=must_fit)
        elif not self._waiting[0][1]:
            self._play_best(limit_seconds)
        else:
            seconds, _, place = heapq.heappop(self._waiting)
            return tuple(self.stateless.cuts[place].tolist()), seconds
        return None

    def _look_at_more(self, limit_seconds: float, *, must_fit: bool) -> None:
        """Each bound takes more time than the one before, and fewer cuts are left for it."""
        more = AT_ONCE if self._num_looked_at else FIRST
        end = min(self._num_looked_at + more, int(np.searchsorted(self.stateless.seconds, limit_seconds)))
        places = np.arange(self._num_looked_at, end)
        self._num_looked_at = end if end < len(self.stateless.seconds) and len(places) else len(self.stateless.seconds)
        if must_fit:
            places = places[self.room.cuts_fit(self.stateless.cuts[places])]
        least = np.zeros(len(places))
        for bound in (self._by_stages, self._by_play_without_state):
            least = np.maximum(least, bound(places))
            places, least = places[least < limit_seconds], least[least < limit_seconds]
        self._wait(places, least, played=False)

    def _play_best(self, limit_seconds: float) -> None:
        best: list[tuple[float, int]] = []
        while self._waiting and not self._waiting[0][1] and len(best) < PLAYED_AT_ONCE:
            seconds, _, place = heapq.heappop(self._waiting)
            best.append((seconds, place))
        places = np.array([place for _, place in best])
        played = stages_in(self.bounds, self.room, self.stateless.cuts[places]).played_seconds()
        least = np.maximum(played, [seconds for seconds, _ in best])
        self._wait(places[least < limit_seconds], least[least < limit_seconds], played=True)

    def _wait(self, places: Places, least: Row, *, played: bool) -> None:
        for place, seconds in zip(places.tolist(), least.tolist(), strict=True):
            heapq.heappush(self._waiting, (seconds, played, place))

    def _by_stages(self, places: Places) -> Row:
        return stages_in(self.bounds, self.room, self.stateless.cuts[places]).least_seconds()

    def _by_play_without_state(self, places: Places) -> Row:
        return self.stateless.played(self.bounds, self.room.point, places)


class StatelessCuts:
    """All cuts, whatever the state of the point."""

    def __init__(self, cuts: Places, seconds: Row) -> None:
        """cuts: one row a cut, where each stage ends. seconds: lower bound on the step of each, rising."""
        self.cuts, self.seconds = cuts, seconds
        self._steps = np.full(len(cuts), np.nan)

    def played(self, bounds: Bounds, point: Point, places: Places) -> Row:
        """Lower bounds of some cuts; each is played once."""
        unknown = places[np.isnan(self._steps[places])]
        if len(unknown):
            self._steps[unknown] = plain_stages(bounds, point, self.cuts[unknown]).played_seconds()
        return np.asarray(self._steps[places])


def _stateless_cuts(bounds: Bounds, point: Point) -> StatelessCuts:
    key = (point.shape, point.schedule, point.virtual)
    known: dict[tuple[object, ...], StatelessCuts] = bounds.stateless_cuts
    if key not in known:
        cuts = _every_cut(bounds.table.num_units, point.num_stages)
        seconds = plain_stages(bounds, point, cuts).least_seconds()
        order = np.argsort(seconds, kind="stable")
        known[key] = StatelessCuts(cuts[order], seconds[order])
    return known[key]


@lru_cache(maxsize=64)
def _every_cut(num_units: int, num_stages: int) -> Places:
    count = num_cuts(num_units, num_stages)
    ends = chain.from_iterable(every_cut(num_units, num_stages))
    return np.fromiter(ends, np.int64, count * num_stages).reshape(count, num_stages)
