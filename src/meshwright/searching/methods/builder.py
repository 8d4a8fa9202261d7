"""From a point of the space to a Plan: what all plans of a problem have in common is found once.

A *point* is a mesh and the settings that go with it. With the number of repeated blocks on each stage (a *cut*) and the rules
of recompute it is a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.core.errors import PlanError
from meshwright.core.legal import Key, LegalSharding, key_of
from meshwright.core.plan import BlockSharding, ContextWay, Mesh, Offload, Plan, Recompute, ScheduleKind, ZeroStage
from meshwright.cost.degrees import check_divides
from meshwright.rules.limits import not_yet
from meshwright.rules.plain_plan import count_microbatches, recompute_rules
from meshwright.rules.sharding import plain_sharding
from meshwright.rules.stages import cut_stages, may_have
from meshwright.rules.tokens import token_names
from meshwright.searching.problem import OffloadKind, Problem
from meshwright.searching.units import even_cut, sizes_of


@dataclass(frozen=True)
class Point:
    """A mesh and its settings, without stages and recompute."""

    mesh: Mesh
    microbatch: int = 1
    sequence_parallel: bool = False
    zero: ZeroStage = 0
    hybrid: int | None = None
    schedule: ScheduleKind = "1f1b"
    virtual: int = 1
    offload: OffloadKind = "none"
    compile: bool = False
    context: ContextWay = "heads"

    @property
    def num_stages(self) -> int:
        return self.mesh.pp * self.virtual


class Builder:
    """Makes the plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.repeated = problem.graph.repeated_blocks
        self._refused: dict[tuple[Mesh, bool, ContextWay], str] = {}

    def plan(
        self,
        point: Point,
        counts: Sequence[int],
        recompute: tuple[Recompute, ...] = (),
        offload: Offload | None = None,
    ) -> Plan:
        """A PlanError says why there is none. offload: of the point's kind; without it, the plain one."""
        problem, request = self.problem, self.problem.request
        return Plan(
            model=problem.graph.model,
            graph=self._graph,
            cluster=self._cluster,
            mesh=point.mesh,
            stages=cut_stages(problem.units.blocks, counts, point.mesh.pp, point.schedule),
            sharding=self._sharding(point),
            sequence_parallel=point.sequence_parallel,
            context=point.context,
            token_blocks=token_names(problem.graph, point.mesh.cp),
            zero=point.zero,
            hybrid=point.hybrid,
            recompute=recompute,
            offload=offload or self.problem.request.offloading(point.offload),
            schedule=point.schedule,
            virtual=point.virtual,
            microbatch=point.microbatch,
            num_microbatches=count_microbatches(problem.global_batch, point.mesh.dp, point.microbatch),
            global_batch=problem.global_batch,
            precision=request.precision or problem.graph.precision,
            compile=point.compile,
            sync_batch_norm=bool(request.sync_batch_norm),
        )

    def even(self, point: Point, recompute: tuple[Recompute, ...] = ()) -> Plan:
        """The plan of a point whose stages are as even as they go."""
        return self.plan(
            point, sizes_of(even_cut(self.problem.units, point.num_stages, self.problem.request.ends)), recompute
        )

    def refusal(self, point: Point) -> str:
        """Why no plan of this point runs, however it is cut; empty where one does."""
        problem = self.problem
        if not may_have(problem.units, point.num_stages, problem.request.ends):
            return f"{point.num_stages} stages need as many repeated blocks, and '{problem.graph.model}' has {len(self.repeated)}"
        try:
            plan = self.even(point, self._least_recompute(point))
        except PlanError as error:
            return str(error)
        return self._refusal_of_mesh(plan) or ", ".join(f"{words} cannot run yet" for words in not_yet(plan))

    def _least_recompute(self, point: Point) -> tuple[Recompute, ...]:
        """Streamed parameters go with full recompute only."""
        return recompute_rules("full", self.repeated) if point.offload == "parameters" else ()

    def _refusal_of_mesh(self, plan: Plan) -> str:
        """Found once for every mesh: neither settings nor stages change it."""
        key = (plan.mesh, plan.sequence_parallel, plan.context)
        if key not in self._refused:
            answer = self._legal.get(key_of(plan))
            self._refused[key] = answer.refusal if answer else ""
            try:
                check_divides(self.problem.graph, plan)
            except PlanError as error:
                self._refused[key] = str(error)
        return self._refused[key]

    def _sharding(self, point: Point) -> tuple[BlockSharding, ...]:
        """What the runtime answered for these degrees; where it was not asked, the plain choice."""
        answer = self._legal.get((point.mesh.tp, point.mesh.cp, point.sequence_parallel, point.context))
        if answer is not None:
            return answer.sharding
        return self._plain_sharding if point.mesh.tp > 1 else ()

    @cached_property
    def _legal(self) -> dict[Key, LegalSharding]:
        return {answer.key: answer for answer in self.problem.legal}

    @cached_property
    def _plain_sharding(self) -> tuple[BlockSharding, ...]:
        return plain_sharding(self.problem.graph)

    @cached_property
    def _graph(self) -> str:
        return self.problem.graph.identity

    @cached_property
    def _cluster(self) -> str:
        return self.problem.cluster.hash
