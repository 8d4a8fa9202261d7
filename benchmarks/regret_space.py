"""The workloads and links of the regret benchmark, and every plan that is measured.

The space, for two ranks and a global batch B, all products of

    one device
    dp 2 with ZeRO 0, 1, 2, 3
    tp 2, with and without sequence parallel
    cp 2
    ep 2 (dp 2 with the experts spread), ZeRO 0
    pp 2 with every schedule, even stages
        x  microbatches: 1, 2 or 4 a step; 2, 4 or 8 with stages
        x  recompute none or full

less what the model or the runtime refuses, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from meshwright.core.graph import Graph
    from meshwright.core.legal import LegalSharding
    from meshwright.core.plan import Plan
    from meshwright.core.request import PlanRequest
    from meshwright.models.source import ModelSource

NUM_RANKS = 2
PRECISION = "fp32"
COUNTS, STAGED_COUNTS = (1, 2, 4), (2, 4, 8)
"""Microbatches a step, without and with stages."""
RECOMPUTES = ("none", "full")


@dataclass(frozen=True)
class Workload:
    model: str
    global_batch: int


WORKLOADS = {
    "gpt": Workload("gpt:layers=4,hidden=128,heads=4,seq=64,vocab=256", 16),
    "mlp": Workload("mlp:layers=4,inputs=256,hidden=256,mlp=8,classes=16", 128),
    "resnet": Workload("resnet:depth=26,image=64,channels=8,classes=16384", 32),
    "moe": Workload("moe:layers=4,hidden=96,heads=4,seq=64,vocab=256,experts=8,top=1", 16),
}
"""Small enough for a step of about a tenth of a second, and such that each has another best plan on some link."""
LINKS: dict[str, float | None] = {"loopback": None, "1 Gbit/s": 1e9, "200 Mbit/s": 200e6}
"""Bits per second between two local hosts; None for two ranks of this one."""


def graph_and_source(workload: Workload) -> tuple[Graph, ModelSource]:
    from meshwright.models.source import resolve
    from meshwright.planner.graphs import graph_of

    return graph_of(workload.model, PRECISION), resolve(workload.model)  # type: ignore[arg-type]


def legal_shardings(graph: Graph, source: ModelSource) -> tuple[LegalSharding, ...]:
    """What the runtime answers for every way to split that two ranks allow."""
    from meshwright.core.errors import PlanError
    from meshwright.core.legal import LegalSharding
    from meshwright.core.request import PlanRequest
    from meshwright.measure.checking.small_plan import try_sharding
    from meshwright.rules.plain_plan import plain_plan

    found = []
    for tp, cp, sequence_parallel in ((2, 1, False), (2, 1, True), (1, 2, False)):
        asked = {"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel}
        try:
            plan = try_sharding(plain_plan(PlanRequest(global_batch=2, **asked), graph, NUM_RANKS, ""), source)  # type: ignore[arg-type]
            found.append(LegalSharding(sharding=plan.sharding, **asked))  # type: ignore[arg-type]
        except PlanError as error:
            found.append(LegalSharding(refusal=str(error), **asked))  # type: ignore[arg-type]
    return tuple(found)


def every_plan(
    graph: Graph, global_batch: int, legal: tuple[LegalSharding, ...], cluster: str
) -> tuple[list[Plan], list[str]]:
    """The plans of the space, the plainest first, and why others are refused."""
    from meshwright.core.errors import MeshwrightError

    plans, refused = [], []
    for request in requests(global_batch):
        try:
            plans.append(plan_of(request, graph, legal, cluster))
        except MeshwrightError as error:
            refused.append(f"{words_of_request(request)}: {error}")
    return plans, refused


def requests(global_batch: int) -> Iterator[PlanRequest]:
    from meshwright.core.plan import ScheduleKind
    from meshwright.core.request import PlanRequest

    flat: list[dict[str, Any]] = [
        {"dp": 1},
        *({"dp": 2, "zero": zero} for zero in range(4)),
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"cp": 2},
        {"dp": 2, "ep": 2},
    ]
    staged: list[dict[str, Any]] = [{"pp": 2, "schedule": kind} for kind in get_args(ScheduleKind)]
    for ways, counts in ((flat, COUNTS), (staged, STAGED_COUNTS)):
        for way, count, recompute in product(ways, counts, RECOMPUTES):
            share = global_batch // way.get("dp", 1)
            yield PlanRequest(global_batch=global_batch, microbatch=share // count, recompute=recompute, **way)


def plan_of(request: PlanRequest, graph: Graph, legal: tuple[LegalSharding, ...], cluster: str) -> Plan:
    """The plan a request stands for, with shardings that run; refused where none does."""
    from meshwright.core.errors import PlanError
    from meshwright.cost.degrees import check_divides
    from meshwright.rules.limits import check_runs
    from meshwright.rules.plain_plan import plain_plan
    from meshwright.rules.schedules import make_order

    world = 1 if request.dp == 1 else NUM_RANKS
    plan = plain_plan(request, graph, world, cluster)
    check_runs(plan)
    make_order(plan.schedule, plan.mesh.pp, plan.num_microbatches, plan.virtual)
    if plan.mesh.ep > 1 and not any(parameter.expert for parameter in graph.parameters):
        raise PlanError("the model has no experts")
    plan = with_answer(plan, legal)
    check_divides(graph, plan)
    return plan


def with_answer(plan: Plan, legal: tuple[LegalSharding, ...]) -> Plan:
    """The plan with the runtime's shardings for its degrees."""
    import msgspec

    from meshwright.core.errors import PlanError
    from meshwright.core.legal import key_of

    for answer in legal:
        if answer.key == key_of(plan):
            if answer.refusal:
                raise PlanError(answer.refusal)
            if answer.tp > 1 and not any("tp" in tensor.dims for rule in answer.sharding for tensor in rule.tensors):
                raise PlanError("no tensor of the model is split over tp")
            return msgspec.structs.replace(plan, sharding=answer.sharding)
    return plan


def words_of_request(request: PlanRequest) -> str:
    import msgspec

    fixed = msgspec.structs.asdict(request)
    return ", ".join(f"{name} {value}" for name, value in fixed.items() if value is not None and name != "global_batch")


def words_of(plan: Plan) -> str:
    """A plan in a few words, its schedule and sequence parallelism among them."""
    from meshwright.core.result import describe

    words = describe(plan)
    if plan.sequence_parallel and "sequence parallel" not in words:
        words += " · sequence parallel"
    if plan.mesh.pp > 1 and plan.schedule not in words:
        words = words.replace(f"pp {plan.mesh.pp}", f"pp {plan.mesh.pp} {plan.schedule}", 1)
    return words.replace(f" · {plan.precision}", "")
