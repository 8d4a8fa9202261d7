"""The tables of units of one problem, one for every way to divide a microbatch, with their shardings and bounds.

What several tables share is computed once: microbatches by their work, kernels by their op, shardings by their degrees.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import product
from math import inf

from meshwright.core.errors import PlanError
from meshwright.core.graph import Casting, Graph
from meshwright.core.plan import BlockSharding, ContextWay, Mesh, Offload, Plan
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.cost.degrees import check_degrees
from meshwright.cost.local_block import LocalBlock, make_local_blocks
from meshwright.cost.memory.local_parameters import Items, items_of
from meshwright.cost.microbatch import Microbatch, microbatch_key, microbatch_of, work_key
from meshwright.rules.divisors import divisors
from meshwright.rules.kinds import cached_in_value
from meshwright.searching.bounds.step_seconds import Bounds
from meshwright.searching.plan_builder import make_plan
from meshwright.searching.problem import Problem
from meshwright.searching.sharding.shardings import Shardings
from meshwright.searching.space import Point, Shape, Way, may_compile
from meshwright.searching.unit_elements import Trained, trained_parameters
from meshwright.searching.unit_table import Divided, UnitTable, divide_units, make_table


class Tables:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.refusals: list[str] = []
        """Why degrees were refused."""
        self._shardings = Shardings(problem, self._kernels, self.refusals)
        self._divided: dict[tuple[object, ...], Divided] = {}
        self._local_blocks: dict[tuple[object, ...], dict[str, LocalBlock]] = {}
        self._microbatches: dict[tuple[object, ...], Microbatch] = {}
        self._alike: dict[tuple[object, ...], Microbatch] = {}
        """Microbatches by their work alone."""
        graphs = (problem.graph, problem.other_casting or problem.graph)
        self._graphs: dict[Casting, Graph] = {graph.casting: graph for graph in graphs}

    def table(self, shape: Shape, *, sharded: bool) -> UnitTable | None:
        """The table of a shape; None where its degrees do not divide the model. sharded: as `Point.casts_ahead`."""
        bounds = self.bounds(shape, sharded=sharded)
        return None if bounds is None else bounds.table

    def bounds(self, shape: Shape, *, sharded: bool) -> Bounds | None:
        """`sharded` matters only where plans that reach 16 bits in the other way run another graph."""
        return self._bounds(shape.of_one_replica, sharded and self.problem.other_casting is not None)

    def bounds_of_both(self, shape: Shape) -> list[Bounds]:
        """Those of both castings, where the degrees are not refused."""
        found = (self.bounds(shape, sharded=sharded) for sharded in (False, True))
        return [one for one in found if one is not None]

    @cached_in_value
    def _bounds(self, shape: Shape, sharded: bool) -> Bounds | None:
        sharding = self.sharding(shape)
        if sharding is None:
            return None
        plan = self._unit_plan(shape, sharding, sharded)
        try:
            check_degrees(self.problem.graph, plan)
        except PlanError as error:
            self.refusals.append(str(error))
            return None
        graph, mesh = self.problem.graph_of(plan), plan.mesh
        key = (mesh.tp, mesh.cp, mesh.ep, plan.sequence_parallel, plan.context, graph.casting)
        if key not in self._divided:
            trained = self._trained(graph.casting)
            self._divided[key] = divide_units(self.problem, graph, plan, self.microbatch(plan), trained)
        return Bounds(self.problem, make_table(self.problem, graph, plan, self._divided[key], self.microbatch(plan)))

    def microbatch(self, plan: Plan) -> Microbatch:
        """The microbatch of a plan of this search, where the sharding follows from the degrees."""
        key, work = microbatch_key(plan), work_key(plan)
        if work not in self._alike:
            graph = self.problem.graph_of(plan)
            known = (self._local_blocks_of(plan, graph), self._kernels(graph.casting))
            self._alike[work] = microbatch_of(graph, plan, self.problem.cluster, self.problem.recipe, *known)
        if key not in self._microbatches:
            self._microbatches[key] = replace(self._alike[work], inner_seconds={})
        return self._microbatches[key]

    def _local_blocks_of(self, plan: Plan, graph: Graph) -> dict[str, LocalBlock]:
        key = (plan.mesh.tp, plan.mesh.cp, plan.sequence_parallel, plan.context, graph.casting)
        if key not in self._local_blocks:
            self._local_blocks[key] = make_local_blocks(graph, plan)
        return self._local_blocks[key]

    @cached_in_value
    def _kernels(self, casting: Casting) -> KernelCosts:
        """Costs of ops. An op that is sharded in the same way under several degrees is costed once."""
        return KernelCosts(self._graphs[casting], self.problem.cluster.device)

    @cached_in_value
    def _trained(self, casting: Casting) -> list[Trained]:
        return trained_parameters(self._graphs[casting], self.problem.units.blocks)

    @cached_in_value
    def least_device_seconds(self, tp: int, cp: int) -> float:
        """The least device-seconds of a step under tp and cp, however these run; infinite where they do not divide the model."""
        found = min(self.device_seconds(tp, cp, way) for way in self._ways(tp, cp))
        asked = any(answer.refusal and answer.key[0] == tp for answer in self.problem.legal)
        return 0.0 if asked and found == inf else found  # what it refuses, it may run under another cp

    def _ways(self, tp: int, cp: int) -> list[Way]:
        """All ways to run tp and cp, even where a part of the search fixes some. With both tp and cp, nothing is compiled."""
        compiled = (False, True) if may_compile(self.problem, tp, cp) else (False,)
        contexts: tuple[ContextWay, ...] = ("heads", "ring") if cp > 1 else ("heads",)
        switches = product((False, True) if tp > 1 else (False,), compiled, contexts)
        return [Way(*switch) for switch in switches]

    @property
    def unsplit(self) -> list[str]:
        """Degrees of tp that only a request for them makes searched, in words."""
        return [f"tp {tp}, of which no split of a tensor is worth its communication" for tp in self._shardings.unsplit]

    def device_seconds(self, tp: int, cp: int, way: Way) -> float:
        """The least device-seconds under tp, cp and this way to run them; infinite where they do not divide the model. Experts may
        run faster spread over ranks than all on one: where constants describe the device, no faster than all samples on one."""
        if self.problem.has_experts and not self.larger_is_quicker:
            return 0.0
        if self.problem.has_experts and tp * cp > 1:
            return self.device_seconds(1, 1, Way(compile=way.compile))
        batch = self.problem.global_batch
        sizes = [batch] if self.larger_is_quicker else divisors(batch)
        least = inf
        for size in sizes:
            shape = Shape.of(Mesh(cp=cp, tp=tp), way, size, batch)
            works = [one.forward_seconds + one.backward_seconds for one in self.bounds_of_both(shape)]
            least = min(least, batch // size * min(works, default=inf))
        return tp * cp * least

    @property
    def larger_is_quicker(self) -> bool:
        """Whether a sample takes less time in a larger microbatch. Constants of a device say that this is so; measurements at some
        sizes say nothing about others."""
        return self.problem.cluster.device.constants is not None

    def _unit_plan(self, shape: Shape, sharding: tuple[BlockSharding, ...], sharded: bool) -> Plan:
        """A plan with one stage per unit. It is not meant to run: with it the cost room costs units one by one."""
        num_units = len(self.problem.units)
        point = Point(replace(shape, pp=num_units), zero=1 if sharded else 0)
        return make_plan(self.problem, point, (1,) * num_units, sharding, offload=Offload())

    def sharding(self, shape: Shape) -> tuple[BlockSharding, ...] | None:
        """The sharding of a shape; None where its degrees are refused."""
        return self._shardings.of(shape)

    @cached_property
    def items(self) -> Items:
        """Bytes of one element of parameters, gradients and state. They follow from the precision alone."""
        shape = Shape.of(Mesh(), Way(), 1, 1)
        return items_of(self._unit_plan(shape, (), sharded=False), self.problem.recipe)
