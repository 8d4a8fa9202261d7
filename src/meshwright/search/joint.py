"""The joint search: best first over meshes, schedules, state, cuts and recompute, with bounds that end it.

A node stands for all plans below it and has a bound on their seconds (search/bounds.py). The node with the least bound is
opened next:

    world        how many devices                                     bound: the work of one device, evenly shared out
      family     mesh, sequence parallel, compile                     bound: the work of its largest microbatch
       shape     and the microbatch                                   bound: its units' work on the busiest coordinate
        turns    schedule and stages a coordinate                     bound: with the schedule's bubble
          point  ZeRO and its groups, offload                         bound: with dp's communication and the update
            cut  where stages end: few are all tried, of many the best by dynamic programming (search/cuts.py)
                 costed with the least recompute that fits (search/fitting.py)

It ends when no open node can be faster than the best plan that fits: that plan is the fastest there is (of all cuts, where all
were tried). After `MOST_COSTED` cuts it ends too, and the least bound that is open says how far from the best the answer may
be. Nodes are counted, not seconds, and ties are broken by the order of opening: the same input gives the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from math import inf

from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan, ScheduleKind
from meshwright.core.request import count_microbatches, share_of_batch
from meshwright.search.cuts import FEW_CUTS, best_cut, every_cut, num_cuts
from meshwright.search.drafts import Drafts
from meshwright.search.fitting import fitted
from meshwright.search.problem import Outcome, Problem
from meshwright.search.room import recompute_seconds
from meshwright.search.space import Point, Shape, families, meshes, states, turns, worlds
from meshwright.search.units import Cut

MOST_COSTED = 160
"""Cuts that are costed before the search gives its best so far."""


EVEN_SLACK = 0.97
"""A sample is quickest in the largest microbatch, but for this: kernels of a smaller one may fill a device a little better."""

Opened = Iterable[tuple[float, "Open"]]
Open = Callable[[], Opened]


def joint(problem: Problem) -> Outcome:
    found = _Search(problem)
    found.run()
    return Outcome(tuple(found.costed), found.num_candidates, found.bound_seconds)


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.drafts = Drafts(problem)
        self.costed: list[tuple[Plan, Estimate]] = []
        self.best_seconds = inf
        self.num_candidates = 0
        self.bound_seconds: float | None = None
        self._open: list[tuple[float, int, Open]] = []
        self._numbers = count()

    def run(self) -> None:
        self._push(self._worlds())
        while self._open and len(self.costed) < MOST_COSTED:
            bound, _, opened = heapq.heappop(self._open)
            if bound >= self.best_seconds:
                self._open = []
                break
            self._push(opened())
        self.bound_seconds = self._open[0][0] if self._open else None
        if not self.costed:
            raise self._nothing()

    def _push(self, nodes: Opened) -> None:
        for bound, opened in nodes:
            if bound < self.best_seconds:
                heapq.heappush(self._open, (bound, next(self._numbers), opened))

    # ------------------------------------------------------------ levels

    def _worlds(self) -> Opened:
        least = EVEN_SLACK * self.drafts.least_device_seconds()
        for world in worlds(self.problem):
            yield least / world, lambda world=world: self._families(world)  # type: ignore[misc]

    def _families(self, world: int) -> Opened:
        for mesh in meshes(self.problem, world):
            for family in families(self.problem, mesh):
                yield self._of_family(family), lambda family=family: self._shapes(family)  # type: ignore[misc]

    def _shapes(self, family: list[Shape]) -> Opened:
        for shape in family:
            self.num_candidates += 1
            yield self._of_shape(shape), lambda shape=shape: self._turns(shape)  # type: ignore[misc]

    def _of_family(self, family: list[Shape]) -> float:
        """The work of its largest microbatch, and the state that adds least to it."""
        best = inf
        for zero, hybrid, offload in states(self.problem, family[0]) if family else ():
            bounds = self.drafts.bounds(family[0], sharded=zero > 0)
            if bounds is not None:
                point = Point(family[0], "1f1b", 1, zero, hybrid, offload)
                best = min(best, EVEN_SLACK * bounds.of_shape(family[0]) + bounds.of_once(point))
        return best

    def _of_shape(self, shape: Shape) -> float:
        """Its work, and the state that adds least to it of those that fit."""
        best = inf
        for zero, hybrid, offload in states(self.problem, shape):
            bounds = self.drafts.bounds(shape, sharded=zero > 0)
            point = Point(shape, "1f1b", 1, zero, hybrid, offload)
            if bounds is None or recompute_seconds(bounds.table, point, self.drafts.room(point)) == inf:
                continue
            best = min(best, bounds.of_shape(shape) + bounds.of_once(point))
        return best

    def _turns(self, shape: Shape) -> Opened:
        for schedule, virtual in turns(self.problem, shape):
            known = [
                one for sharded in (False, True) if (one := self.drafts.bounds(shape, sharded=sharded)) is not None
            ]
            bound = min(one.of_turns(shape, schedule, virtual) for one in known)
            yield bound, lambda schedule=schedule, virtual=virtual: self._points(shape, schedule, virtual)  # type: ignore[misc]

    def _points(self, shape: Shape, schedule: ScheduleKind, virtual: int) -> Opened:
        for zero, hybrid, offload in states(self.problem, shape):
            point = Point(shape, schedule, virtual, zero, hybrid, offload)
            bounds = self.drafts.bounds(shape, sharded=zero > 0)
            if bounds is not None and self.drafts.runs(point):
                self.num_candidates += 1
                yield bounds.of_point(point, self.drafts.room(point)), lambda point=point: self._cuts(point)  # type: ignore[misc]

    def _cuts(self, point: Point) -> Opened:
        bounds = self.drafts.bounds(point.shape, sharded=point.zero > 0)
        assert bounds is not None
        room, units = self.drafts.room(point), bounds.table.num_units
        found: Iterable[tuple[Cut, float]]
        if num_cuts(units, point.num_stages) <= FEW_CUTS:
            found = ((cut, 0.0) for cut in every_cut(units, point.num_stages))
        else:
            best = best_cut(bounds.table, point, room)
            found = [best] if best is not None else []
        for cut, largest in found:
            yield bounds.of_cut(point, cut, room, largest), lambda cut=cut: self._cost(point, cut)  # type: ignore[misc]

    def _cost(self, point: Point, cut: Cut) -> Opened:
        plan = self.drafts.plan(point, cut)
        table = self.drafts.table(point.shape, sharded=point.zero > 0)
        if plan is None or table is None:
            return ()
        try:
            costed = fitted(self.problem, point, cut, plan, table)
        except PlanError:
            return ()  # a block that reads what a later stage makes, or the like: no such plan
        self.costed.append(costed)
        if costed[1].fits:
            self.best_seconds = min(self.best_seconds, costed[1].step_seconds)
        return ()

    def _nothing(self) -> PlanError:
        """No candidate agrees with the request: say why, as a plain plan would."""
        if self.drafts.refusals:
            return PlanError(self.drafts.refusals[0])
        request, batch = self.problem.request, self.problem.global_batch
        world = worlds(self.problem)[0]
        dp = request.dp or world // ((request.pp or 1) * (request.tp or 1) * (request.cp or 1)) or 1
        share_of_batch(batch, dp)
        count_microbatches(batch, dp, request.microbatch or 1)
        return PlanError(f"no plan for {world} ranks agrees with what was asked for: leave a degree open")
