"""A plan for a model that is small enough to be compared with one process: what was asked for, with shardings that run."""

from __future__ import annotations

import msgspec

from meshwright.capturing.capture import capture_source
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.cost.degrees import check_divides
from meshwright.measure.cutting import check_stages
from meshwright.measure.mean_loss import cuts_batch, find_in_source
from meshwright.models.faked.build import build_followable
from meshwright.models.source import ModelSource
from meshwright.rules.limits import check_runs
from meshwright.rules.plain_plan import plain_mesh, plain_plan, share_of_batch
from meshwright.runtime.own_backward import check_hooks
from meshwright.runtime.split.legal import legal_plan

SAMPLES_PER_RANK = 4


def small_plan(source: ModelSource, request: PlanRequest, num_ranks: int, graph: Graph | None = None) -> Plan:
    """A microbatch that is not given is half of a rank's samples; all of them, for a loss that sees the whole batch."""
    dp = plain_mesh(request, num_ranks).dp
    global_batch = request.global_batch or SAMPLES_PER_RANK * dp
    share = share_of_batch(global_batch, dp)
    graph = graph or capture_source(source, "fp64")
    found = find_in_source(source)
    microbatch = request.microbatch or (share // 2 if share % 2 == 0 and found is None else share)
    wish = PlanRequest(global_batch=global_batch, microbatch=microbatch, precision="fp64")
    plan = plain_plan(request.updated(wish), graph, num_ranks, "parity")
    if found is not None and cuts_batch(plan):
        raise found.refusal(plan)
    check_runs(plan)
    check_divides(graph, plan)
    check_stages(source, plan)
    return try_sharding(msgspec.structs.replace(plan, model=source.name), source)


def try_sharding(plan: Plan, source: ModelSource) -> Plan:
    """The plan with what was found legal for its degree of tp."""
    if source.example is None:
        return plan
    module = build_followable(source.build)
    check_hooks(module, plan)
    return legal_plan(plan, module, source.example(2))
