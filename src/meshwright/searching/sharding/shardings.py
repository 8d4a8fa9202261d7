"""The shardings of one problem, for any degrees: what the runtime answered about them, or what the integer program proposes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.core.errors import PlanError
from meshwright.core.graph import Casting
from meshwright.core.legal import Key
from meshwright.core.plan import BlockSharding, Offload, Plan
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.cost.degrees import check_degrees, check_divides
from meshwright.rules.kinds import cached_in_value
from meshwright.rules.sharding import plain_sharding
from meshwright.searching.plan_builder import make_plan
from meshwright.searching.problem import Problem
from meshwright.searching.sharding.best_sharding import best_sharding
from meshwright.searching.space import Point, Shape


class Shardings:
    """kernels: gives the costs of the ops of a casting, shared with other callers. refusals: reasons for refused degrees are added
    here."""

    def __init__(self, problem: Problem, kernels: Callable[[Casting], KernelCosts], refusals: list[str]) -> None:
        self.problem, self._kernels, self.refusals = problem, kernels, refusals
        self._known: dict[Key, tuple[BlockSharding, ...] | None] = {}
        self.unsplit: set[int] = set()
        """Degrees of tp without a proposal, for which a request that fixes them would get one."""

    def of(self, shape: Shape) -> tuple[BlockSharding, ...] | None:
        """The sharding of a shape, as the runtime answered or as proposed; None where its degrees are refused."""
        if shape.key not in self._known:
            self._known[shape.key] = self._find(shape)
        return self._known[shape.key]

    def _find(self, shape: Shape) -> tuple[BlockSharding, ...] | None:
        answer = self.problem.answer(shape.key)
        if answer is not None and answer.refusal:
            self.refusals.append(answer.refusal)
            return None
        try:
            check_degrees(self.problem.graph, self._whole_plan(shape, ()))
            found = (
                answer.sharding if answer is not None else self._proposal(shape.tp, shape.cp, shape.sequence_parallel)
            )
            check_divides(self.problem.graph, self._whole_plan(shape, found))
        except PlanError as error:
            self.refusals.append(str(error))
            return None
        return found

    def _whole_plan(self, shape: Shape, sharding: tuple[BlockSharding, ...]) -> Plan:
        """A plan with all blocks in one stage, which is enough to check degrees."""
        point = Point(replace(shape.of_one_replica, microbatch=1, compile=False))
        return make_plan(self.problem, point, (len(self.problem.units),), sharding, offload=Offload())

    @cached_in_value
    def _proposal(self, tp: int, cp: int, sequence_parallel: bool) -> tuple[BlockSharding, ...]:
        """The sharding that the integer program picks for one sample. More samples, or another way to run cp, seldom change it.

        Where no split is worth its collectives for one sample, the program is solved for the whole batch. Where none is worth it
        there either, the plain sharding is proposed: without a split there is no tp, and tp may be needed to fit in memory. On a
        CPU, where estimates of tp are too low, only a request for this tp gets one of these two."""
        if tp == 1:
            return ()
        problem = self.problem
        found = self._picked(tp, cp, sequence_parallel, microbatch=1)
        if found:
            return found
        if problem.cluster.device.kind != "cpu" or problem.request.tp == tp:
            most = self._picked(tp, cp, sequence_parallel, microbatch=problem.global_batch)
            return most or plain_sharding(problem.graph)
        self.unsplit.add(tp)
        return ()

    def _picked(self, tp: int, cp: int, sequence_parallel: bool, microbatch: int) -> tuple[BlockSharding, ...]:
        found = best_sharding(
            self.problem.graph,
            self.problem.cluster,
            tp=tp,
            cp=cp,
            sequence_parallel=sequence_parallel,
            microbatch=microbatch,
            recipe=self.problem.recipe,
            kernels=self._kernels(self.problem.graph.casting),
        )
        return found.sharding if found else ()
