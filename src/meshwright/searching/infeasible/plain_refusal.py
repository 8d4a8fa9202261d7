"""Why no plan agrees with a request: what the plain plan of the request is refused for."""

from __future__ import annotations

import msgspec

from meshwright.core.errors import PlanError, ScheduleError
from meshwright.core.request import PlanRequest
from meshwright.cost.degrees import check_degrees, check_divides
from meshwright.cost.estimate import check_costable
from meshwright.rules.limits import check_runs
from meshwright.rules.plain_plan import plain_plan
from meshwright.rules.schedules import make_order
from meshwright.searching.problem import Problem


def plain_refusal(problem: Problem, request: PlanRequest, world: int) -> PlanError | None:
    """None where the plain plan is legal."""
    try:
        plan = plain_plan(request, problem.graph, world, problem.cluster_hash)
        graph = problem.graph_of(plan)
        check_costable(graph, plan, problem.cluster)
        check_degrees(graph, msgspec.structs.replace(plan, sharding=()))  # a search leaves no attention whole
        check_divides(graph, plan)
        check_runs(plan)
        make_order(plan.schedule, plan.mesh.pp, plan.global_batch // plan.mesh.dp, plan.virtual)
    except (PlanError, ScheduleError) as error:
        return PlanError(str(error))
    return None
