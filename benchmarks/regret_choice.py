"""Which plan is chosen, what each is predicted to take, and what people answer without a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.core.cluster import Cluster
    from meshwright.core.graph import Graph
    from meshwright.core.legal import LegalSharding
    from meshwright.core.plan import Plan

Chooser = Callable[["Graph", "Cluster", "list[Plan]", int, "tuple[LegalSharding, ...]"], "Plan"]


def by_estimate(
    graph: Graph, cluster: Cluster, plans: list[Plan], global_batch: int, legal: tuple[LegalSharding, ...]
) -> Plan:
    """The fastest of the list as the cost model has it."""
    return min(plans, key=lambda plan: _estimate(graph, plan, cluster).step_seconds)


def by_search(
    graph: Graph, cluster: Cluster, plans: list[Plan], global_batch: int, legal: tuple[LegalSharding, ...]
) -> Plan:
    """What `meshwright plan` would choose, in the list or not."""
    from meshwright.core.request import PlanRequest
    from meshwright.searching.search import search

    return search(graph, cluster, PlanRequest(global_batch=global_batch), legal=legal).plan


CHOOSERS: dict[str, Chooser] = {"search": by_search, "estimate": by_estimate}
DEFAULT = "search"


def prediction(graph: Graph, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    from msgspec import to_builtins

    found = _estimate(graph, plan, cluster)
    return {"predicted_seconds": found.step_seconds, "predicted_parts": to_builtins(found.time_seconds)}


def standing_answers(plans: list[Plan]) -> dict[str, int]:
    """Plain DDP and plain ZeRO 3: one microbatch, nothing recomputed."""
    found = {}
    for number, plan in enumerate(plans):
        is_plain = plan.mesh.dp == 2 and plan.mesh.ep == 1 and plan.num_microbatches == 1 and not plan.recompute
        name = {0: "ddp", 3: "zero3"}.get(plan.zero)
        if is_plain and name is not None:
            found.setdefault(name, number)
    return found


def thinned(plans: list[Plan]) -> list[Plan]:
    """For a look: nothing recomputed, the fewest microbatches of each way."""
    found: dict[Any, Plan] = {}
    for plan in plans:
        if not plan.recompute:
            found.setdefault((plan.mesh, plan.zero, plan.schedule, plan.sequence_parallel), plan)
    return list(found.values())


def _estimate(graph: Graph, plan: Plan, cluster: Cluster) -> Any:
    from meshwright.cost.estimate import estimate

    return estimate(graph, plan, cluster)
