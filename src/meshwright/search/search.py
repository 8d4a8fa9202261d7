"""Choose a plan: enumerate, cost, rank, and say why each runner-up lost.

Candidates are all of

    dp ∈ divisors of the devices  ×  {replicate, ZeRO 1, 2, 3}  ×  microbatch ∈ divisors of a rank's samples
       ×  {no recompute, full recompute}

less what the request fixes. The fastest that fits the budget wins; among equals the simpler one (fewer microbatches, less
ZeRO, no recompute). The order is fixed, so the same input gives the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest, plain_plan, share_of_batch
from meshwright.core.result import RunnerUp, SearchResult, describe
from meshwright.core.units import format_bytes
from meshwright.cost.estimate import estimate
from meshwright.search.reasons import reason_lost

SAMPLES_PER_DEVICE = 8
"""Global batch per device where nobody gave one."""


def search(
    graph: Graph,
    cluster: Cluster,
    request: PlanRequest | None = None,
    *,
    recipe: Recipe | None = None,
    budget_bytes: int | None = None,
    world: int | None = None,
) -> SearchResult:
    """The best plan for a graph on a cluster. `world` fixes the number of ranks; without it fewer devices may be used."""
    started = time.perf_counter()
    plans = list(candidates(graph, cluster, request or PlanRequest(), world))
    costed = [(plan, estimate(graph, plan, cluster, recipe, budget_bytes)) for plan in plans]
    fitting = sorted((pair for pair in costed if pair[1].fits), key=_preference)
    missing = sorted((pair for pair in costed if not pair[1].fits), key=lambda pair: pair[1].peak_bytes)
    if not fitting:
        raise _infeasible(missing, cluster)
    best, best_estimate = fitting[0]
    return SearchResult(
        plan=best,
        estimate=best_estimate,
        runners_up=tuple(
            RunnerUp(
                plan=plan,
                step_seconds=found.step_seconds,
                peak_bytes=found.peak_bytes,
                reason=reason_lost(found, best_estimate),
            )
            for plan, found in (*fitting[1:], *missing)
        ),
        num_candidates=len(plans),
        search_seconds=time.perf_counter() - started,
    )


def candidates(graph: Graph, cluster: Cluster, request: PlanRequest, world: int | None) -> Iterator[Plan]:
    """Every plan that agrees with the request, legal ones only."""
    global_batch = request.global_batch or SAMPLES_PER_DEVICE * (world or cluster.num_devices)
    found = False
    for dp in _degrees(cluster, request, world):
        if global_batch % dp:
            continue
        for part in _choices(request, global_batch // dp, dp, bool(graph.repeated_blocks)):
            found = True
            wish = msgspec.structs.replace(request, global_batch=global_batch, dp=dp, **part)
            yield plain_plan(wish, graph, dp, cluster.hash)
    if not found:
        degrees = _degrees(cluster, request, world)
        share_of_batch(global_batch, degrees[-1])
        raise PlanError(f"no plan agrees with the request: global batch {global_batch}, dp one of {degrees}")


def _degrees(cluster: Cluster, request: PlanRequest, world: int | None) -> list[int]:
    for axis in ("tp", "pp", "cp", "ep"):
        if (getattr(request, axis) or 1) > 1:
            raise PlanError(
                f"{axis}={getattr(request, axis)}: this version searches data-parallel plans; leave {axis} out"
            )
    devices = world or cluster.num_devices
    if devices > cluster.num_devices:
        raise PlanError(f"{devices} ranks were asked for, but '{cluster.name}' has {cluster.num_devices} devices")
    if request.dp is not None:
        if request.dp > devices or (world is not None and request.dp != world):
            raise PlanError(f"dp={request.dp} was asked for, but there are {devices} ranks: make them equal")
        return [request.dp]
    return [devices] if world else [degree for degree in range(1, devices + 1) if devices % degree == 0]


def _choices(request: PlanRequest, share: int, dp: int, has_blocks: bool) -> Iterator[dict[str, object]]:
    """Values of the open fields, the plainest first."""
    if request.microbatch is not None and share % request.microbatch:
        share_of_batch(share * dp, dp)
        raise PlanError(f"microbatch {request.microbatch} does not divide the {share} samples of each of {dp} ranks")
    microbatches = [request.microbatch] if request.microbatch else [n for n in range(share, 0, -1) if share % n == 0]
    stages = [request.zero] if request.zero is not None else ([0, 1, 2, 3] if dp > 1 else [0])
    recomputes = [request.recompute] if request.recompute else (["none", "full"] if has_blocks else ["none"])
    for microbatch in microbatches:
        for zero in stages:
            for recompute in recomputes:
                yield {"microbatch": microbatch, "zero": zero, "recompute": recompute}


def _preference(pair: tuple[Plan, Estimate]) -> tuple[float, int, int, int]:
    plan, found = pair
    return (found.step_seconds, plan.num_microbatches, plan.zero, len(plan.recompute))


def _infeasible(missing: list[tuple[Plan, Estimate]], cluster: Cluster) -> InfeasibleError:
    plan, found = missing[0]
    parts = msgspec.structs.asdict(found.memory_bytes)
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    words = ", ".join(f"{name.replace('_', ' ')} {format_bytes(parts[name])}" for name in largest)
    return InfeasibleError(
        f"none of {len(missing)} candidates fits {format_bytes(found.budget_bytes)} per device on {cluster.num_devices} × "
        f"{cluster.device.name}. The nearest miss ({describe(plan)}) needs {format_bytes(found.peak_bytes)}, "
        f"{format_bytes(found.peak_bytes - found.budget_bytes)} too much, most of it {words}. "
        "Use more devices, a smaller global batch, bf16, or a larger --memory"
    )
