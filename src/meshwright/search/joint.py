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

Short dives find good plans to begin with (1f1b without cp for each tp inside a host, then everything on the best mesh so far).
The search ends when no open node can be faster than the best plan that fits: that plan is the fastest there is (of all cuts, where
all were tried). After `MOST_COSTED` cuts or `MOST_OPENED` nodes it ends too, and the least bound that is open says how far from the
best the answer may be. Nodes are counted, not seconds, and ties are broken by the order of opening: the same input gives the same
plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from math import inf, prod

import msgspec

from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.limits import check_runs
from meshwright.core.plan import Plan, ScheduleKind
from meshwright.core.request import plain_plan
from meshwright.cost.division import check_divides
from meshwright.search.choice import error_band
from meshwright.search.cuts import FEW_CUTS, best_cut, every_cut, num_cuts
from meshwright.search.drafts import LARGE_MICROBATCH, Drafts
from meshwright.search.fitting import fitted
from meshwright.search.problem import Outcome, Problem
from meshwright.search.room import least_bytes, recompute_seconds
from meshwright.search.space import Point, Shape, divisors, families, meshes, states, turns, worlds
from meshwright.search.units import FEW_UNITS, Cut, even_cut

MOST_COSTED = 160
"""Cuts that are costed before the search gives its best so far; ten times as many where there are few units."""
MOST_OPENED = 2000
"""Nodes of all levels, likewise."""
FEW_OPENED = 500
"""The same, for each dive and each look at simpler plans."""
MOST_DIVED = 6
"""Cuts that are costed to begin with, for each degree of tp."""
MOST_SIMPLER = 5
"""Cuts that are costed to find a simpler plan that is as fast, for every mechanism that is left out."""
MOST_NEAREST = 8
"""Cuts that are costed to find the nearest miss, where nothing fits."""
EVEN_SLACK = 0.97
"""A sample is quickest in the largest microbatch, but for this: kernels of a smaller one may fill a device a little better."""

Opened = Iterable[tuple[float, "Open"]]
Open = Callable[[], Opened]


def joint(problem: Problem) -> Outcome:
    drafts = Drafts(problem)
    costed = _dives(problem, drafts)
    few = 10 if len(drafts.units) <= FEW_UNITS else 1  # estimates of a few blocks cost little: be sure
    found = _Search(problem, drafts, known=costed, most_costed=few * MOST_COSTED, most_opened=few * MOST_OPENED)
    found.run()
    costed = list(found.costed)
    if found.fastest is not None and not problem.prefer_fastest:
        costed += _simpler(problem, found)
    if found.fastest is None:
        costed = found.nearest()
    bound = found.bound_seconds if found.bound_seconds is not None else found.best_seconds
    return Outcome(tuple(costed), max(len(drafts.points), len(costed)), bound if bound < inf else None)


def _dives(problem: Problem, drafts: Drafts) -> list[tuple[Plan, Estimate]]:
    """Good plans to begin with, so that bounds have something to cut off: 1f1b on all devices without cp, tp inside a host; then
    all else on the best mesh of these."""
    costed: list[tuple[Plan, Estimate]] = []
    best: _Search | None = None
    world = worlds(problem)[:1]
    for tp in divisors(problem.cluster.devices_per_host):
        fixed = {"cp": 1, "schedule": "1f1b", "tp": tp, **({"sequence_parallel": True} if tp > 1 else {})}
        narrow = _narrowed(problem, fixed)
        if narrow is None or not world:
            continue
        best = _Search(
            replace(narrow, world=world[0]),
            drafts,
            known=costed,
            most_costed=len(costed) + MOST_DIVED,
            most_opened=FEW_OPENED,
        )
        best.run()
        costed = best.costed
    if best is None or best.fastest is None:
        return costed
    mesh = best.fastest[0].mesh
    same = _narrowed(problem, {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp, "ep": mesh.ep})
    assert same is not None
    then = _Search(same, drafts, known=costed, most_costed=2 * MOST_DIVED, most_opened=FEW_OPENED)
    then.run()
    return then.costed


def _narrowed(problem: Problem, fixed: dict[str, object]) -> Problem | None:
    """The problem with these parts fixed too; None where the request says otherwise."""
    asked = msgspec.structs.asdict(problem.request)
    if any(asked[name] not in (None, value) for name, value in fixed.items()):
        return None
    return replace(problem, request=msgspec.structs.replace(problem.request, **fixed))


def _simpler(problem: Problem, found: _Search) -> list[tuple[Plan, Estimate]]:
    """Plans without one of the mechanisms of the fastest, as far as they are as fast within the estimate's error."""
    assert found.fastest is not None
    plan, mesh = found.fastest[0], found.fastest[0].mesh
    restrictions: list[tuple[bool, dict[str, object]]] = [
        (mesh.pp > 1, {"pp": 1}),
        (mesh.tp > 1, {"tp": 1}),
        (mesh.cp > 1, {"cp": 1}),
        (mesh.ep > 1, {"ep": 1}),
        (plan.zero > 0, {"zero": 0}),
        (plan.schedule != "1f1b", {"schedule": "1f1b"}),
        (plan.sequence_parallel, {"sequence_parallel": False}),
        (bool(plan.recompute), {"recompute": "none"}),
        (plan.compile, {"compile": False}),
    ]
    costed = []
    limit = found.best_seconds * (1 + error_band(problem.cluster))
    for applies, fixed in restrictions:
        narrow = _narrowed(problem, fixed) if applies else None
        if narrow is not None:
            part = _Search(narrow, found.drafts, limit_seconds=limit, most_costed=MOST_SIMPLER, most_opened=FEW_OPENED)
            part.run()
            costed += part.costed
    return costed


class _Search:
    """known: plans that were costed before; limit_seconds: slower ones are not looked for."""

    def __init__(
        self,
        problem: Problem,
        drafts: Drafts,
        *,
        known: list[tuple[Plan, Estimate]] | None = None,
        limit_seconds: float = inf,
        most_costed: int = MOST_COSTED,
        most_opened: int = MOST_OPENED,
    ) -> None:
        self.problem = problem
        self.drafts = drafts
        self.costed: list[tuple[Plan, Estimate]] = list(known or [])
        self._points_costed = {_identity(plan) for plan, _ in self.costed}
        fitting = [pair for pair in self.costed if pair[1].fits]
        self.fastest = min(fitting, key=lambda pair: pair[1].step_seconds, default=None)
        self.best_seconds = min(limit_seconds, self.fastest[1].step_seconds if self.fastest else inf)
        self.most_costed, self.most_opened = most_costed, most_opened
        self.num_costed = 0
        self.bound_seconds: float | None = None
        """The least bound that was still open; None where nothing was."""
        self._open: list[tuple[float, int, Open]] = []
        self._numbers = count()

    def run(self) -> None:
        self._push(self._worlds())
        opened_nodes = 0
        while self._open and self.num_costed < self.most_costed and opened_nodes < self.most_opened:
            opened_nodes += 1
            bound, _, opened = heapq.heappop(self._open)
            if bound >= self.best_seconds:
                self._open = []
                break
            self._push(opened())
        self.bound_seconds = self._open[0][0] if self._open else None

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
            yield self._of_shape(shape), lambda shape=shape: self._turns(shape)  # type: ignore[misc]

    def _of_family(self, family: list[Shape]) -> float:
        """The work of its largest microbatch, and the state that adds least to it of those that fit with the smallest."""
        best = inf
        if not family or self.drafts.sharding(family[0]) is None:
            return inf
        largest = next((shape for shape in family if shape.microbatch <= LARGE_MICROBATCH), family[-1])
        smallest = family[-1]
        for zero, hybrid, offload in states(self.problem, smallest):
            bounds = self.drafts.bounds(largest, sharded=zero > 0)
            table = self.drafts.table(smallest, sharded=zero > 0)
            if bounds is None or table is None:
                return inf
            point = Point(smallest, "1f1b", 1, zero, hybrid, offload)
            if recompute_seconds(table, point, self.drafts.room(point)) < inf:
                best = min(best, EVEN_SLACK * bounds.of_shape(largest) + bounds.of_once(replace(point, shape=largest)))
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
                self.drafts.points.add(point)
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
        if plan is None or table is None or _identity(plan) in self._points_costed:
            return ()
        try:
            costed = fitted(self.problem, point, cut, plan, table, must_fit=self.fastest is not None)
        except PlanError:
            return ()  # a block that reads what a later stage makes, or the like: no such plan
        self.num_costed += 1
        if costed is None:
            return ()
        self.costed.append(costed)
        if costed[1].fits and costed[1].step_seconds < self.best_seconds:
            self.fastest, self.best_seconds = costed, costed[1].step_seconds
        return ()

    # ------------------------------------------------------------ nothing fits

    def nearest(self) -> list[tuple[Plan, Estimate]]:
        """The plans that are over the budget by least, where none fits: by the bound on memory first, then costed."""
        found: list[tuple[float, int, Point]] = []
        for world in worlds(self.problem):
            for mesh in meshes(self.problem, world):
                for family in families(self.problem, mesh):
                    found += self._over(family[-1:], len(found))
            if found:
                break
        if not found:
            raise self._nothing()
        for _, _, point in heapq.nsmallest(MOST_NEAREST, found):
            self._cost(point, even_cut(len(self.drafts.units), point.num_stages))
        if not self.costed:
            raise self._nothing()
        return self.costed

    def _over(self, shapes: list[Shape], number: int) -> list[tuple[float, int, Point]]:
        """The smallest microbatch of a family under every state, each with the bytes it needs at least."""
        found: list[tuple[float, int, Point]] = []
        for shape in shapes:
            for zero, hybrid, offload in states(self.problem, shape):
                point = Point(shape, "1f1b", 1, zero, hybrid, offload)
                bounds = self.drafts.bounds(shape, sharded=zero > 0)
                if bounds is not None and self.drafts.runs(point):
                    needed = least_bytes(bounds.table, point, self.drafts.room(point))
                    found.append((needed, number + len(found), point))
        return found

    def _nothing(self) -> PlanError:
        """No candidate agrees with the request: say why, as a plain plan would."""
        problem = self.problem
        degrees = {axis: getattr(problem.request, axis) for axis in ("pp", "dp", "cp", "tp")}
        needed = prod(degree or 1 for degree in degrees.values())
        asked = " · ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree is not None)
        if needed > problem.devices:
            return PlanError(
                f"{asked} needs {needed} ranks, but there are {problem.devices}: lower a degree or use more devices"
            )
        if (problem.world is not None and problem.world % needed) or (
            None not in degrees.values() and not worlds(problem)
        ):
            return PlanError(f"{asked} needs {needed} ranks, but there are {problem.world}: make them equal")
        world = needed if problem.request.dp is not None else worlds(problem)[0]
        wish = msgspec.structs.replace(problem.request, global_batch=problem.global_batch)
        try:
            plan = plain_plan(wish, problem.graph, world, problem.cluster_hash)
            check_divides(problem.graph_of(plan), plan)
            check_runs(plan)
        except PlanError as error:
            return error
        refused = self.drafts.refusals[-1] if self.drafts.refusals else "leave a degree open"
        return PlanError(f"no plan for {world} ranks agrees with what was asked for: {refused}")


def _identity(plan: Plan) -> tuple[object, ...]:
    """What makes two plans the same but for their recompute."""
    stages = tuple(stage.blocks for stage in plan.stages)
    state = (plan.zero, plan.hybrid, plan.offload.what, plan.compile, plan.sequence_parallel)
    return (plan.mesh, stages, plan.schedule, plan.microbatch, *state)
