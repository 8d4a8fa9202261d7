"""The shardings of one problem, for any degrees: what the runtime answered about them, or what the integer program proposes."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.core.errors import PlanError
from meshwright.core.graph import Graph
from meshwright.core.legal import Key
from meshwright.core.names import compact_names
from meshwright.core.plan import BlockSharding, Mesh, Plan, Stage
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.cost.degrees import check_degrees, check_divides
from meshwright.rules.sharding import plain_sharding
from meshwright.searching.problem import Problem
from meshwright.searching.sharding.best_sharding import best_sharding
from meshwright.searching.space import Shape


class Shardings:
    """kernels: gives the costs of ops, shared with other callers. refusals: reasons for refused degrees are added here."""

    def __init__(self, problem: Problem, kernels: Callable[[Graph], KernelCosts], refusals: list[str]) -> None:
        self.problem, self._kernels, self.refusals = problem, kernels, refusals
        names = compact_names(name for unit in problem.units.blocks for name in unit)
        self._stages = (Stage(coordinate=0, blocks=names),)
        self._answers = {answer.key: answer for answer in problem.legal}
        self._known: dict[Key, tuple[BlockSharding, ...] | None] = {}
        self._proposals: dict[tuple[int, int, bool], tuple[BlockSharding, ...]] = {}
        self.unsplit: set[int] = set()
        """Degrees of tp without a proposal, for which a request that fixes them would get one."""

    def of(self, shape: Shape) -> tuple[BlockSharding, ...] | None:
        """The sharding of a shape, as the runtime answered or as proposed; None where its degrees are refused."""
        key = (shape.tp, shape.cp, shape.sequence_parallel, shape.context)
        if key not in self._known:
            self._known[key] = self._find(shape)
        return self._known[key]

    def _find(self, shape: Shape) -> tuple[BlockSharding, ...] | None:
        answer = self._answers.get((shape.tp, shape.cp, shape.sequence_parallel, shape.context))
        if answer is not None and answer.refusal:
            self.refusals.append(answer.refusal)
            return None
        try:
            check_degrees(self.problem.graph, self._whole_plan(shape, ()))
            found = answer.sharding if answer is not None else self._proposal(shape)
            check_divides(self.problem.graph, self._whole_plan(shape, found))
        except PlanError as error:
            self.refusals.append(str(error))
            return None
        return found

    def _whole_plan(self, shape: Shape, sharding: tuple[BlockSharding, ...]) -> Plan:
        """A plan with all blocks in one stage, which is enough to check degrees."""
        return Plan(
            mesh=Mesh(dp=shape.ep, cp=shape.cp, tp=shape.tp, ep=shape.ep),
            stages=self._stages,
            sharding=sharding,
            sequence_parallel=shape.sequence_parallel,
            context=shape.context,
            microbatch=1,
            num_microbatches=1,
            global_batch=shape.ep,
        )

    def _proposal(self, shape: Shape) -> tuple[BlockSharding, ...]:
        """The sharding that the integer program picks for one sample. More samples, or another way to run cp, seldom change it.

        Where no split is worth its collectives for one sample, the program is solved for the whole batch. Where none is worth it
        there either, the plain sharding is proposed: without a split there is no tp, and tp may be needed to fit in memory. On a
        CPU, where estimates of tp are too low, only a request for this tp gets one of these two."""
        if shape.tp == 1:
            return ()
        key = (shape.tp, shape.cp, shape.sequence_parallel)
        if key not in self._proposals:
            found = self._picked(shape, 1)
            if not found and (self.problem.cluster.device.kind != "cpu" or self.problem.request.tp == shape.tp):
                found = self._picked(shape, self.problem.global_batch) or plain_sharding(self.problem.graph)
            elif not found:
                self.unsplit.add(shape.tp)
            self._proposals[key] = found
        return self._proposals[key]

    def _picked(self, shape: Shape, microbatch: int) -> tuple[BlockSharding, ...]:
        return best_sharding(
            self.problem.graph,
            self.problem.cluster,
            tp=shape.tp,
            cp=shape.cp,
            sequence_parallel=shape.sequence_parallel,
            microbatch=microbatch,
            recipe=self.problem.recipe,
            kernels=self._kernels(self.problem.graph),
        )
