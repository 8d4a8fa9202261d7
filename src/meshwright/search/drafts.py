"""What the search looks up again and again: tables of work, bounds, shardings; and the plans its points stand for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import inf

from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.limits import not_yet
from meshwright.core.plan import BlockSharding, ContextWay, Mesh, Plan, Stage
from meshwright.core.stages import cut_stages
from meshwright.cost.compute import KernelCosts
from meshwright.cost.division import Division, check_degrees, divide
from meshwright.cost.microbatch import Microbatch, microbatch_key, microbatch_of, work_key
from meshwright.cost.state import Items, items_of
from meshwright.cost.streaming import StreamedCost
from meshwright.search.bounds import Bounds, Needs
from meshwright.search.problem import Problem
from meshwright.search.room import Room, least_bytes, recompute_seconds, room_of
from meshwright.search.shardings import Shardings
from meshwright.search.space import Point, Shape, divisors
from meshwright.search.streamed import Streamed, streamed_plans
from meshwright.search.units import Cut, even_cut, sizes_of, units_of
from meshwright.search.work import Divided, UnitTable, divide_units, make_table

ROUNDING = 1e-6
"""Of bytes, as shares of them, that may decide no plan's fate before it is costed."""
LARGE_MICROBATCH = 16
"""Kernels of so many samples run as well as they ever will."""

Key = tuple[int, int, int, bool, int, bool, bool, ContextWay]


class Drafts:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.units = units_of(problem.graph)
        self._unit_stages = tuple(Stage(coordinate=number, blocks=unit) for number, unit in enumerate(self.units))
        self.points: set[Point] = set()
        """Candidates that were looked at, by all parts of the search."""
        self.refusals: list[str] = []
        """Why degrees were left out."""
        self._shardings = Shardings(problem, self._kernels, self.refusals)
        self._divided: dict[tuple[object, ...], Divided] = {}
        self._divisions: dict[tuple[object, ...], dict[str, Division]] = {}
        self._tables: dict[Key, UnitTable | None] = {}
        self._bounds: dict[Key, Bounds] = {}
        self.fitted: dict[tuple[object, ...], tuple[Plan, Estimate] | None] = {}
        """Plans that were costed, by their identity; None where nothing made one fit."""
        self._microbatches: dict[tuple[object, ...], Microbatch] = {}
        self._alike: dict[tuple[object, ...], Microbatch] = {}
        """By work alone."""
        self._kernels_of: dict[int, KernelCosts] = {}
        self._rooms: dict[Point, Room] = {}
        self._needs: dict[Point, Needs | None] = {}
        self._once: dict[Point, float] = {}
        self._streamed: dict[Point, Streamed | None] = {}
        self.family_bounds: dict[tuple[object, ...], float] = {}
        self.shape_bounds: dict[tuple[object, ...], float] = {}
        self._runs: dict[tuple[object, ...], bool] = {}

    # ------------------------------------------------------------ tables

    def table(self, shape: Shape, *, sharded: bool) -> UnitTable | None:
        """None where these degrees do not divide the model."""
        key = self._key(shape, sharded)
        if key not in self._tables:
            self._tables[key] = self._make_table(shape, sharded)
        return self._tables[key]

    def bounds(self, shape: Shape, *, sharded: bool) -> Bounds | None:
        table = self.table(shape, sharded=sharded)
        if table is None:
            return None
        key = self._key(shape, sharded)
        if key not in self._bounds:
            self._bounds[key] = Bounds(self.problem, table)
        return self._bounds[key]

    def _key(self, shape: Shape, sharded: bool) -> Key:
        """Casting differs with sharding in 16 bits only."""
        differs = sharded and self.problem.other_casting is not None
        return (
            shape.tp,
            shape.cp,
            shape.ep,
            shape.sequence_parallel,
            shape.microbatch,
            shape.compile,
            differs,
            shape.context,
        )

    def _make_table(self, shape: Shape, sharded: bool) -> UnitTable | None:
        sharding = self.sharding(shape)
        if sharding is None:
            return None
        plan = self._unit_plan(shape, sharding, sharded)
        if not self._has_degrees(plan):
            return None
        graph = self.problem.graph_of(plan)
        key = (shape.tp, shape.cp, shape.ep, shape.sequence_parallel, shape.context, id(graph))
        if key not in self._divided:
            self._divided[key] = divide_units(self.problem, graph, plan, self._microbatch(plan, graph))
        return make_table(self.problem, graph, plan, self._divided[key], self.microbatch(plan))

    def _has_degrees(self, plan: Plan) -> bool:
        """Whether its degrees divide the model, its experts too."""
        try:
            check_degrees(self.problem.graph, plan)
        except PlanError as error:
            self.refusals.append(str(error))
            return False
        return True

    def microbatch(self, plan: Plan) -> Microbatch:
        """Of plans that are made here: their sharding follows from their degrees."""
        key = microbatch_key(plan)
        if key not in self._microbatches:
            self._microbatches[key] = self._microbatch(plan, self.problem.graph_of(plan))
        return self._microbatches[key]

    def _microbatch(self, plan: Plan, graph: Graph) -> Microbatch:
        key = work_key(plan)
        if key not in self._alike:
            problem = self.problem
            known = (self._divide(plan, graph), self._kernels(graph))
            self._alike[key] = microbatch_of(graph, plan, problem.cluster, problem.recipe, *known)
        return replace(self._alike[key], inner_seconds={})

    def _divide(self, plan: Plan, graph: Graph) -> dict[str, Division]:
        key = (plan.mesh.tp, plan.mesh.cp, plan.sequence_parallel, plan.context, id(graph))
        if key not in self._divisions:
            self._divisions[key] = divide(graph, plan)
        return self._divisions[key]

    def _kernels(self, graph: Graph) -> KernelCosts:
        """An op that lies alike under several degrees is costed once."""
        if id(graph) not in self._kernels_of:
            self._kernels_of[id(graph)] = KernelCosts(graph, self.problem.cluster.device)
        return self._kernels_of[id(graph)]

    def least_device_seconds(self) -> float:
        """Device-seconds of a step at least: no way to divide the model makes a sample cheaper than one device alone does."""
        share = self.problem.global_batch
        size = max(part for part in divisors(share) if part <= LARGE_MICROBATCH)
        found = []
        for compiled in (False, True) if self.problem.cluster.device.kind == "cuda" else (False,):
            for sharded in (False, True):
                shape = Shape(1, 1, 1, 1, 1, False, size, share // size, compiled)
                bounds = self.bounds(shape, sharded=sharded)
                found += [(bounds.forward_seconds + bounds.backward_seconds) / size] if bounds else []
        return share * min(found)

    def _unit_plan(self, shape: Shape, sharding: tuple[BlockSharding, ...], sharded: bool) -> Plan:
        """One stage a unit: no plan to run, but what the cost room takes to cost units one by one."""
        return Plan(
            mesh=Mesh(pp=len(self.units), dp=shape.ep, cp=shape.cp, tp=shape.tp, ep=shape.ep),
            stages=self._unit_stages,
            sharding=sharding,
            sequence_parallel=shape.sequence_parallel,
            context=shape.context,
            zero=1 if sharded else 0,
            microbatch=shape.microbatch,
            num_microbatches=1,
            global_batch=shape.microbatch * shape.ep,
            precision=self.problem.graph.precision,
            compile=shape.compile,
        )

    def sharding(self, shape: Shape) -> tuple[BlockSharding, ...] | None:
        """None where the degrees are refused."""
        return self._shardings.of(shape)

    # ------------------------------------------------------------ plans

    def plan(self, point: Point, cut: Cut) -> Plan | None:
        """The point with this cut, nothing recomputed; None where the value refuses itself."""
        shape, request, graph = point.shape, self.problem.request, self.problem.graph
        try:
            return Plan(
                model=graph.model,
                graph=graph.identity,
                cluster=self.problem.cluster_hash,
                mesh=shape.mesh,
                stages=cut_stages(graph, sizes_of(cut), shape.pp, point.schedule),
                sharding=self.sharding(shape) or (),
                sequence_parallel=shape.sequence_parallel,
                context=shape.context,
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
        """Whether the runtime can run what the point combines; the blocks and numbers do not matter for that."""
        shape = point.shape
        if point.offload == "parameters":
            return self.streamed(point) is not None
        key = (shape.compile, shape.tp * shape.cp > 1, shape.pp > 1, point.schedule, point.zero, point.offload)
        if key not in self._runs:
            cut = even_cut(len(self.units), point.num_stages)
            asked = self.problem.request.offload is not None  # who asks for it may see what it would cost
            plan = self.plan(replace(point, offload="none") if asked else point, cut)
            if plan is None:
                return False  # for its own numbers: others of its kind may run
            self._runs[key] = not not_yet(plan)
        return self._runs[key]

    def streamed(self, point: Point) -> Streamed | None:
        """Of a point that offloads parameters; None where no such plan runs."""
        if point not in self._streamed:
            self._streamed[point] = self._find_streamed(point)
        return self._streamed[point]

    def _find_streamed(self, point: Point) -> Streamed | None:
        plan, bounds = self.plan(point, (len(self.units),)), self.bounds(point.shape, sharded=point.casts_ahead)
        plans = [] if plan is None or bounds is None else list(streamed_plans(self.problem, plan))
        if bounds is None or not plans:
            return None
        costs = [
            StreamedCost(self.problem.graph_of(one), one, self.problem.recipe, self.microbatch(one).divisions)
            for one in (plans[0], plans[-1])
        ]
        return Streamed(bounds, point, *costs)

    def room(self, point: Point) -> Room:
        """Whatever the turns."""
        key = replace(point, schedule="1f1b", virtual=1)
        if key not in self._rooms:
            problem = self.problem
            self._rooms[key] = room_of(point, self._items, problem.recipe, problem.budget, problem.cluster.device)
        return self._rooms[key]

    def needs(self, point: Point) -> Needs | None:
        """Whatever the turns; None where the degrees are refused, or nothing makes it fit."""
        if point not in self._needs and point.offload == "parameters":
            streamed = self.streamed(point)
            self._needs[point] = streamed.needs if streamed is not None and self._has_room(streamed) else None
        if point not in self._needs:
            bounds = self.bounds(point.shape, sharded=point.casts_ahead)
            again = inf if bounds is None else recompute_seconds(bounds.table, point, self.room(point))
            self._needs[point] = None if bounds is None or again == inf else bounds.needs(point, again)
        return self._needs[point]

    def _has_room(self, streamed: Streamed) -> bool:
        room = self.room(streamed.point).budget_bytes * (1 + ROUNDING)
        return streamed.least_bytes <= room and self.problem.hosts_hold(streamed.least_host_bytes)

    def least_bytes(self, point: Point) -> float | None:
        """What a device needs at least; None where the degrees are refused, or the runtime cannot run it."""
        bounds = self.bounds(point.shape, sharded=point.casts_ahead)
        if bounds is None or not self.runs(point):
            return None
        streamed = self.streamed(point) if point.offload == "parameters" else None
        return least_bytes(bounds.table, point, self.room(point)) if streamed is None else streamed.least_bytes

    def bound(self, point: Point) -> float | None:
        """Seconds of a step at least, infinite where it cannot fit; None as above."""
        bounds = self.bounds(point.shape, sharded=point.casts_ahead)
        if bounds is None or not self.runs(point):
            return None
        if point.offload != "parameters":
            return bounds.of_point(point, self.room(point))
        needs = self.needs(point)
        return inf if needs is None else bounds.with_turns(point.shape, needs, point.schedule, point.virtual)

    def once(self, point: Point) -> float:
        """Seconds that its state adds at least once a step, whatever it recomputes."""
        if point not in self._once and point.offload == "parameters":
            streamed = self.streamed(point)
            self._once[point] = inf if streamed is None else streamed.once
        if point not in self._once:
            bounds = self.bounds(point.shape, sharded=point.casts_ahead)
            self._once[point] = inf if bounds is None else bounds.of_once(point)
        return self._once[point]

    @cached_property
    def _items(self) -> Items:
        """Bytes of an element follow from the precision alone."""
        first = Shape(1, 1, 1, 1, 1, sequence_parallel=False, microbatch=1, num_microbatches=1, compile=False)
        return items_of(self._unit_plan(first, (), sharded=False), self.problem.recipe)
