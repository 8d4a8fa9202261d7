"""The tables of units of one problem, one for every way to divide a microbatch, with their shardings and bounds.

What several tables share is computed once: microbatches by their work, kernels by their op, shardings by their degrees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf

from meshwright.core.errors import PlanError
from meshwright.core.graph import Graph
from meshwright.core.plan import BlockSharding, ContextWay, Mesh, Plan, Stage
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.cost.degrees import check_degrees
from meshwright.cost.local_block import LocalBlock, make_local_blocks
from meshwright.cost.memory.local_parameters import Items, items_of
from meshwright.cost.microbatch import Microbatch, microbatch_key, microbatch_of, work_key
from meshwright.rules.divisors import divisors
from meshwright.rules.tokens import token_names
from meshwright.searching.bounds.step_seconds import Bounds
from meshwright.searching.problem import Problem
from meshwright.searching.sharding.shardings import Shardings
from meshwright.searching.space import Shape, Way, may_compile
from meshwright.searching.unit_elements import Trained, trained_parameters
from meshwright.searching.unit_table import Divided, UnitTable, divide_units, make_table

Key = tuple[int, int, int, bool, int, bool, bool, ContextWay]


@dataclass(frozen=True)
class _OfGraph:
    """What is found once for each casting of the graph."""

    kernels: KernelCosts
    trained: list[Trained]


class Tables:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        units = problem.units.blocks
        self._unit_stages = tuple(Stage(coordinate=number, blocks=unit) for number, unit in enumerate(units))
        self.refusals: list[str] = []
        """Why degrees were refused."""
        self._shardings = Shardings(problem, self._kernels, self.refusals)
        self._divided: dict[tuple[object, ...], Divided] = {}
        self._local_blocks: dict[tuple[object, ...], dict[str, LocalBlock]] = {}
        self._tables: dict[Key, UnitTable | None] = {}
        self._bounds: dict[Key, Bounds] = {}
        self._microbatches: dict[tuple[object, ...], Microbatch] = {}
        self._alike: dict[tuple[object, ...], Microbatch] = {}
        """Microbatches by their work alone."""
        self._of_graph: dict[int, _OfGraph] = {}
        self._refused: dict[tuple[object, ...], str | None] = {}
        """Why degrees do not divide the model, where they do not."""
        self._least: dict[tuple[int, int], float] = {}

    def table(self, shape: Shape, *, sharded: bool) -> UnitTable | None:
        """The table of a shape; None where its degrees do not divide the model. sharded: as `Point.casts_ahead`."""
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
        """`sharded` matters only where plans that reach 16 bits in the other way run another graph."""
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
            trained = self._known(graph).trained
            self._divided[key] = divide_units(self.problem, graph, plan, self._microbatch(plan, graph), trained)
        return make_table(self.problem, graph, plan, self._divided[key], self.microbatch(plan))

    def _has_degrees(self, plan: Plan) -> bool:
        """Whether the plan's degrees divide the model and its experts, for any microbatch."""
        mesh = plan.mesh
        key = (mesh.tp, mesh.cp, mesh.ep, plan.sequence_parallel, plan.context)
        if key not in self._refused:
            try:
                check_degrees(self.problem.graph, plan)
                self._refused[key] = None
            except PlanError as error:
                self._refused[key] = str(error)
        refused = self._refused[key]
        if refused is not None:
            self.refusals.append(refused)
        return refused is None

    def microbatch(self, plan: Plan) -> Microbatch:
        """The microbatch of a plan of this search, where the sharding follows from the degrees."""
        key = microbatch_key(plan)
        if key not in self._microbatches:
            self._microbatches[key] = self._microbatch(plan, self.problem.graph_of(plan))
        return self._microbatches[key]

    def _microbatch(self, plan: Plan, graph: Graph) -> Microbatch:
        key = work_key(plan)
        if key not in self._alike:
            problem = self.problem
            known = (self._local_blocks_of(plan, graph), self._kernels(graph))
            self._alike[key] = microbatch_of(graph, plan, problem.cluster, problem.recipe, *known)
        return replace(self._alike[key], inner_seconds={})

    def _local_blocks_of(self, plan: Plan, graph: Graph) -> dict[str, LocalBlock]:
        key = (plan.mesh.tp, plan.mesh.cp, plan.sequence_parallel, plan.context, id(graph))
        if key not in self._local_blocks:
            self._local_blocks[key] = make_local_blocks(graph, plan)
        return self._local_blocks[key]

    def _kernels(self, graph: Graph) -> KernelCosts:
        """Costs of ops. An op that is sharded in the same way under several degrees is costed once."""
        return self._known(graph).kernels

    def _known(self, graph: Graph) -> _OfGraph:
        if id(graph) not in self._of_graph:
            kernels = KernelCosts(graph, self.problem.cluster.device)
            self._of_graph[id(graph)] = _OfGraph(kernels, trained_parameters(graph, self.problem.units.blocks))
        return self._of_graph[id(graph)]

    def least_device_seconds(self, tp: int, cp: int) -> float:
        """The least device-seconds of a step under tp and cp, however these run; infinite where they do not divide the model."""
        key = (tp, cp)
        if key not in self._least:
            found = min(self.device_seconds(tp, cp, way) for way in self._ways(tp, cp))
            asked = any(answer.refusal and answer.key[0] == tp for answer in self.problem.legal)
            self._least[key] = 0.0 if asked and found == inf else found  # what it refuses, it may run under another cp
        return self._least[key]

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
            return self.device_seconds(1, 1, Way(sequence_parallel=False, compile=way.compile, context="heads"))
        batch = self.problem.global_batch
        sizes = [batch] if self.larger_is_quicker else divisors(batch)
        least = inf
        for size in sizes:
            shape = Shape(1, 1, cp, tp, 1, way.sequence_parallel, size, batch // size, way.compile, way.context)
            known = (self.bounds(shape, sharded=sharded) for sharded in (False, True))
            works = [one.forward_seconds + one.backward_seconds for one in known if one is not None]
            least = min(least, batch // size * min(works, default=inf))
        return tp * cp * least

    @property
    def larger_is_quicker(self) -> bool:
        """Whether a sample takes less time in a larger microbatch. Constants of a device say that this is so; measurements at some
        sizes say nothing about others."""
        return self.problem.cluster.device.constants is not None

    def _unit_plan(self, shape: Shape, sharding: tuple[BlockSharding, ...], sharded: bool) -> Plan:
        """A plan with one stage per unit. It is not meant to run: with it the cost room costs units one by one."""
        return Plan(
            mesh=Mesh(pp=len(self._unit_stages), dp=shape.ep, cp=shape.cp, tp=shape.tp, ep=shape.ep),
            stages=self._unit_stages,
            sharding=sharding,
            sequence_parallel=shape.sequence_parallel,
            context=shape.context,
            token_blocks=token_names(self.problem.graph, shape.cp),
            zero=1 if sharded else 0,
            microbatch=shape.microbatch,
            num_microbatches=1,
            global_batch=shape.microbatch * shape.ep,
            precision=self.problem.graph.precision,
            compile=shape.compile,
        )

    def sharding(self, shape: Shape) -> tuple[BlockSharding, ...] | None:
        """The sharding of a shape; None where its degrees are refused."""
        return self._shardings.of(shape)

    @cached_property
    def items(self) -> Items:
        """Bytes of one element of parameters, gradients and state. They follow from the precision alone."""
        first = Shape(1, 1, 1, 1, 1, sequence_parallel=False, microbatch=1, num_microbatches=1, compile=False)
        return items_of(self._unit_plan(first, (), sharded=False), self.problem.recipe)
