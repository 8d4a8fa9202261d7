"""Candidates of the joint search: for each point its plan, its memory, its bounds, and whether the runtime can run it.

The search asks for these many times, so each is computed once and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan, ScheduleKind
from meshwright.cost.parameter_offload import StreamedCost
from meshwright.rules.kinds import cached_in_value
from meshwright.rules.limits import not_yet
from meshwright.searching.bounds.by_coordinate import least_of_any_cut, least_of_any_schedule
from meshwright.searching.bounds.coordinate_loads import HeldMicrobatches
from meshwright.searching.bounds.memory import Room, has_gradients, has_like_stages, held_of, room_of
from meshwright.searching.bounds.step_seconds import Bounds, Needs
from meshwright.searching.joint.unit_tables import Tables
from meshwright.searching.memory_saving.parameter_streaming import Streamed, streamed_plans
from meshwright.searching.plan_builder import make_plan
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape, schedules
from meshwright.searching.units import Cut, even_cut, sizes_of

ROUNDING = 1e-6
"""A share of the bytes. A plan that is over the budget by no more is costed, since rounding alone must not rule it out."""


class Drafts:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = Tables(problem)
        self.units = problem.units
        self.refusals = self.tables.refusals
        """Why candidates were refused."""
        self.points: set[Point] = set()
        """Candidates that any part of the search has looked at."""
        self.fitted: dict[tuple[object, ...], tuple[Plan, Estimate] | None] = {}
        """Plans that were costed, by their identity; None where nothing made one fit."""
        self.best_seconds = inf
        """Of the fastest plan that any part of the search has found, for people who watch it."""
        self.family_bounds: dict[tuple[object, ...], float] = {}
        self.shape_bounds: dict[tuple[object, ...], float] = {}
        self._fewest: dict[tuple[object, ...], HeldMicrobatches] = {}
        self._runs: dict[tuple[object, ...], bool] = {}

    def bounds(self, point: Point) -> Bounds | None:
        """None where the degrees are refused."""
        return self.tables.bounds(point.shape, sharded=point.casts_ahead)

    def plan(self, point: Point, cut: Cut) -> Plan | None:
        """The plan of a point with this cut, without recompute; None where such a plan is not legal."""
        try:
            return make_plan(self.problem, point, sizes_of(cut), self.tables.sharding(point.shape) or ())
        except PlanError as error:
            self.refusals.append(str(error))
            return None

    def runs(self, point: Point) -> bool:
        """Whether the runtime can run the mechanisms that the point combines. This does not depend on blocks or sizes."""
        shape = point.shape
        if point.offload == "parameters":
            return self.streamed(point) is not None
        key = (shape.compile, shape.tp * shape.cp > 1, shape.pp > 1, point.schedule, point.zero, point.offload)
        if key not in self._runs:
            plan = self.plan(point, even_cut(self.units, point.num_stages, self.problem.request.ends))
            if plan is None:
                return False  # for its own numbers: others of its kind may run
            self._runs[key] = not not_yet(plan)
        return self._runs[key]

    @cached_in_value
    def streamed(self, point: Point) -> Streamed | None:
        """Bounds on a point that offloads parameters; None where the runtime can run no such plan."""
        plan, bounds = self.plan(point, (len(self.units),)), self.bounds(point)
        plans = [] if plan is None or bounds is None else list(streamed_plans(self.problem, plan))
        if bounds is None or not plans:
            return None
        costs = [
            StreamedCost(self.problem.graph_of(one), one, self.problem.recipe, self.tables.microbatch(one).local_blocks)
            for one in (plans[0], plans[-1])
        ]
        return Streamed(bounds, point, *costs)

    def room(self, point: Point) -> Room | None:
        """Memory of a point under its own schedule; None where the degrees are refused."""
        return self._room(point, has_gradients(point.shape, point.zero, point.schedule))

    def _loosest_room(self, point: Point) -> Room | None:
        """Memory of a point under the schedule that needs least."""
        shape, kinds = point.shape, schedules(self.problem, point.shape.pp)
        return self._room(point, all(has_gradients(shape, point.zero, kind) for kind in kinds))

    @cached_in_value
    def _room(self, point: Point, gradients: bool) -> Room | None:
        bounds = self.bounds(point)
        if bounds is None:
            return None
        return room_of(self.problem, point, bounds.table, self.tables.items, gradients=gradients)

    @cached_in_value
    def needs(self, point: Point) -> Needs | None:
        """What a point needs at least, whatever its schedule; None where the degrees are refused, or where it cannot fit."""
        return self._needs_in(point, self._loosest_room(point))

    def _needs_in(self, point: Point, room: Room | None) -> Needs | None:
        bounds = self.bounds(point)
        if bounds is None or room is None:
            return None
        if point.offload != "parameters":
            return bounds.needs_in(room)
        streamed = self.streamed(point)
        if streamed is None or streamed.least_bytes > room.budget_bytes * (1 + ROUNDING):
            return None
        return streamed.needs if self.problem.hosts_hold(streamed.least_host_bytes) else None

    def least_bytes(self, point: Point) -> float | None:
        """Bytes a device needs at least; None where the degrees are refused, or the runtime cannot run the point."""
        room = self.room(point)
        if room is None or not self.runs(point):
            return None
        streamed = self.streamed(point) if point.offload == "parameters" else None
        return room.least_bytes if streamed is None else streamed.least_bytes

    def bound(self, point: Point) -> float | None:
        """Lower bound on the seconds of a step, infinite where the point cannot fit; None as for `least_bytes`."""
        bounds, room = self.bounds(point), self.room(point)
        if bounds is None or room is None or not self.runs(point):
            return None
        return self.with_turns(point) if point.offload == "parameters" else bounds.of_point(room)

    def with_turns(self, point: Point) -> float:
        """A quicker bound, which does not look at single units."""
        bounds, needs = self.bounds(point), self._needs_in(point, self.room(point))
        if bounds is None or needs is None:
            return inf
        return bounds.with_turns(point.shape, needs, point.schedule, point.virtual)

    def expected(self, point: Point) -> float:
        """About how many seconds a step takes, infinite where the point cannot run or fit. It orders points and rules none out."""
        bounds = self.bounds(point)
        if bounds is None or not self.runs(point):
            return inf
        needs = self._needs_in(point, self.room(point))
        return inf if needs is None else bounds.expected(point, needs)

    def fewest_held(self, shape: Shape, ways: Sequence[tuple[ScheduleKind, int]]) -> HeldMicrobatches | None:
        """Microbatches that each coordinate holds at least, whatever the schedule; None where nothing is known of them together."""
        bounds = self.tables.bounds(shape, sharded=True) if shape.pp > 1 and ways else None
        if bounds is None:
            return None
        like_stages = has_like_stages(self.problem, bounds.table)
        if not like_stages and any(virtual > 1 for _, virtual in ways):
            return None
        key = (shape.pp, shape.num_microbatches, tuple(ways), bounds.table.likeness("none"))
        if key not in self._fewest:
            every = [held_of(bounds.table, Point(shape, *way), "none", like_stages=like_stages) for way in ways]
            self._fewest[key] = HeldMicrobatches(np.min([one.ways[-1][0] for one in every], axis=0))
        return self._fewest[key]

    @cached_in_value
    def of_coordinates(self, point: Point) -> float:
        """Lower bound on a point by what each coordinate has memory for; infinite where no cut fits."""
        bounds, room = self.bounds(point), self.room(point)
        if point.shape.pp == 1 or bounds is None or room is None or point.offload == "parameters":
            return 0.0
        return least_of_any_cut(bounds, room)

    def under_any_schedule(self, point: Point, held: HeldMicrobatches | None) -> float:
        """Lower bound on a point by what each coordinate has memory for, whatever its schedule."""
        bounds, room = self.bounds(point), self._loosest_room(point)
        if held is None or bounds is None or room is None or point.offload == "parameters":
            return 0.0
        return least_of_any_schedule(bounds, room, held)

    @cached_in_value
    def once(self, point: Point) -> float:
        """Seconds that the state of a point adds to a step at least, whatever is recomputed."""
        if point.offload == "parameters":
            streamed = self.streamed(point)
            return inf if streamed is None else streamed.once
        bounds = self.bounds(point)
        return inf if bounds is None else bounds.of_once(point)
