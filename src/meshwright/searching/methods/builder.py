"""The plans of the methods that do not decide shardings: what the runtime answered, or the plain sharding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from meshwright.core.errors import PlanError
from meshwright.core.legal import key_of
from meshwright.core.plan import BlockSharding, Offload, Plan, Recompute
from meshwright.cost.degrees import check_divides
from meshwright.rules.limits import not_yet
from meshwright.rules.plain_plan import recompute_rules
from meshwright.rules.sharding import plain_sharding
from meshwright.rules.stages import may_have
from meshwright.searching.plan_builder import make_plan
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape
from meshwright.searching.units import even_cut, sizes_of


class Builder:
    """Makes the plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._divides: dict[tuple[object, ...], bool] = {}

    def plan(
        self,
        point: Point,
        counts: Sequence[int],
        recompute: tuple[Recompute, ...] = (),
        offload: Offload | None = None,
    ) -> Plan:
        return make_plan(self.problem, point, counts, self._sharding(point.shape), recompute, offload)

    def even(self, point: Point, recompute: tuple[Recompute, ...] = ()) -> Plan:
        """The plan of a point whose stages are as even as they go."""
        return self.plan(
            point, sizes_of(even_cut(self.problem.units, point.num_stages, self.problem.request.ends)), recompute
        )

    def runs(self, point: Point) -> bool:
        """Whether some plan of this point can run, however it is cut."""
        problem, request = self.problem, self.problem.request
        if request.precision not in (None, problem.graph.precision):
            return False
        if not may_have(problem.units, point.num_stages, request.ends):
            return False
        streams = point.offload == "parameters"  # with full recompute only
        try:
            plan = self.even(point, recompute_rules("full", problem.graph.repeated_blocks) if streams else ())
        except PlanError:
            return False
        return self._has_degrees(plan) and not not_yet(plan)

    def _has_degrees(self, plan: Plan) -> bool:
        """Whether the degrees divide the model, and the runtime has not refused them."""
        key = (plan.mesh, *key_of(plan))
        if key not in self._divides:
            answer = self.problem.answer(key_of(plan))
            try:
                check_divides(self.problem.graph, plan)
                self._divides[key] = answer is None or not answer.refusal
            except PlanError:
                self._divides[key] = False
        return self._divides[key]

    def _sharding(self, shape: Shape) -> tuple[BlockSharding, ...]:
        answer = self.problem.answer(shape.key)
        if answer is not None:
            return answer.sharding
        return self._plain_sharding if shape.tp > 1 else ()

    @cached_property
    def _plain_sharding(self) -> tuple[BlockSharding, ...]:
        return plain_sharding(self.problem.graph)
