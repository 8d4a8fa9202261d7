"""Candidates of the joint search: for each point its plan, its memory, its bounds, and whether the runtime can run it.

The search asks for these many times, so each is computed once and kept.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.cost.parameter_offload import StreamedCost
from meshwright.rules.limits import not_yet
from meshwright.rules.stages import cut_stages
from meshwright.rules.tokens import token_names
from meshwright.searching.bounds.memory import Room, has_gradients, least_bytes, room_of
from meshwright.searching.bounds.step_seconds import Needs
from meshwright.searching.joint.unit_tables import Tables
from meshwright.searching.memory_saving.parameter_streaming import Streamed, streamed_plans
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, schedules
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
        self.family_bounds: dict[tuple[object, ...], float] = {}
        self.shape_bounds: dict[tuple[object, ...], float] = {}
        self._rooms: dict[tuple[object, ...], Room] = {}
        self._needs: dict[Point, Needs | None] = {}
        self._once: dict[Point, float] = {}
        self._streamed: dict[Point, Streamed | None] = {}
        self._runs: dict[tuple[object, ...], bool] = {}

    def plan(self, point: Point, cut: Cut) -> Plan | None:
        """The plan of a point with this cut, without recompute; None where such a plan is not legal."""
        shape, request, graph = point.shape, self.problem.request, self.problem.graph
        try:
            return Plan(
                model=graph.model,
                graph=graph.identity,
                cluster=self.problem.cluster_hash,
                mesh=shape.mesh,
                stages=cut_stages(self.units.blocks, sizes_of(cut), shape.pp, point.schedule),
                sharding=self.tables.sharding(shape) or (),
                sequence_parallel=shape.sequence_parallel,
                context=shape.context,
                token_blocks=token_names(graph, shape.cp),
                zero=point.zero,
                hybrid=point.hybrid,
                offload=self.problem.request.offloading(point.offload),
                schedule=point.schedule,
                virtual=point.virtual,
                microbatch=shape.microbatch,
                num_microbatches=shape.num_microbatches,
                global_batch=self.problem.global_batch,
                precision=graph.precision,
                compile=shape.compile,
                sync_batch_norm=bool(request.sync_batch_norm),
            )
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
            cut = even_cut(self.units, point.num_stages, self.problem.request.ends)
            asked = self.problem.request.offload is not None  # who asks for it may see what it would cost
            plan = self.plan(replace(point, offload="none") if asked else point, cut)
            if plan is None:
                return False  # for its own numbers: others of its kind may run
            self._runs[key] = not not_yet(plan)
        return self._runs[key]

    def streamed(self, point: Point) -> Streamed | None:
        """Bounds on a point that offloads parameters; None where the runtime can run no such plan."""
        if point not in self._streamed:
            self._streamed[point] = self._find_streamed(point)
        return self._streamed[point]

    def _find_streamed(self, point: Point) -> Streamed | None:
        plan = self.plan(point, (len(self.units),))
        bounds = self.tables.bounds(point.shape, sharded=point.casts_ahead)
        plans = [] if plan is None or bounds is None else list(streamed_plans(self.problem, plan))
        if bounds is None or not plans:
            return None
        costs = [
            StreamedCost(self.problem.graph_of(one), one, self.problem.recipe, self.tables.microbatch(one).local_blocks)
            for one in (plans[0], plans[-1])
        ]
        return Streamed(bounds, point, *costs)

    def room(self, point: Point) -> Room:
        """Memory of a point under its own schedule."""
        return self._room(point, has_gradients(point.shape, point.zero, point.schedule))

    def _loosest_room(self, point: Point) -> Room:
        """Memory of a point under the schedule that needs least."""
        shape, kinds = point.shape, schedules(self.problem, point.shape.pp)
        return self._room(point, all(has_gradients(shape, point.zero, kind) for kind in kinds))

    def _room(self, point: Point, gradients: bool) -> Room:
        key = (point.shape, point.zero, point.hybrid, point.offload, gradients)
        if key not in self._rooms:
            problem = self.problem
            about = (self.tables.items, problem.recipe, problem.budget, problem.cluster.device)
            self._rooms[key] = room_of(point, *about, gradients=gradients)
        return self._rooms[key]

    def needs(self, point: Point) -> Needs | None:
        """What a point needs at least, whatever its schedule; None where the degrees are refused, or where it cannot fit."""
        if point not in self._needs and point.offload == "parameters":
            streamed = self.streamed(point)
            self._needs[point] = streamed.needs if streamed is not None and self._has_room(streamed) else None
        if point not in self._needs:
            bounds = self.tables.bounds(point.shape, sharded=point.casts_ahead)
            self._needs[point] = None if bounds is None else bounds.needs_in(point, self._loosest_room(point))
        return self._needs[point]

    def _has_room(self, streamed: Streamed) -> bool:
        room = self.room(streamed.point).budget_bytes * (1 + ROUNDING)
        return streamed.least_bytes <= room and self.problem.hosts_hold(streamed.least_host_bytes)

    def least_bytes(self, point: Point) -> float | None:
        """Bytes a device needs at least; None where the degrees are refused, or the runtime cannot run the point."""
        bounds = self.tables.bounds(point.shape, sharded=point.casts_ahead)
        if bounds is None or not self.runs(point):
            return None
        streamed = self.streamed(point) if point.offload == "parameters" else None
        return least_bytes(bounds.table, point, self.room(point)) if streamed is None else streamed.least_bytes

    def bound(self, point: Point) -> float | None:
        """Lower bound on the seconds of a step, infinite where the point cannot fit; None as for `least_bytes`."""
        bounds = self.tables.bounds(point.shape, sharded=point.casts_ahead)
        if bounds is None or not self.runs(point):
            return None
        if point.offload == "parameters":
            return self.with_turns(point)
        return bounds.of_point(point, self.room(point))

    def with_turns(self, point: Point) -> float:
        """A quicker bound, which does not look at single units."""
        bounds = self.tables.bounds(point.shape, sharded=point.casts_ahead)
        if point.offload == "parameters":
            needs = self.needs(point)
        else:
            needs = None if bounds is None else bounds.needs_in(point, self.room(point))
        if bounds is None or needs is None:
            return inf
        return bounds.with_turns(point.shape, needs, point.schedule, point.virtual)

    def expected(self, point: Point) -> float:
        """About how many seconds a step takes, infinite where the point cannot run or fit. It orders points and rules none out."""
        bounds = self.tables.bounds(point.shape, sharded=point.casts_ahead)
        if bounds is None or not self.runs(point):
            return inf
        if point.offload == "parameters":
            needs = self.needs(point)
        else:
            needs = bounds.needs_in(point, self.room(point))
        return inf if needs is None else bounds.expected(point, needs)

    def once(self, point: Point) -> float:
        """Seconds that the state of a point adds to a step at least, whatever is recomputed."""
        if point not in self._once and point.offload == "parameters":
            streamed = self.streamed(point)
            self._once[point] = inf if streamed is None else streamed.once
        if point not in self._once:
            bounds = self.tables.bounds(point.shape, sharded=point.casts_ahead)
            self._once[point] = inf if bounds is None else bounds.of_once(point)
        return self._once[point]
