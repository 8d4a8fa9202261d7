"""Choose a plan: enumerate, cost, rank, and say why each runner-up lost.

Candidates are all of

    dp ∈ divisors of the batch, up to the devices  ×  {replicate, ZeRO 1, 2, 3}  ×  microbatch ∈ divisors of a rank's samples
       ×  {no recompute, full recompute}

less what the request fixes. The fastest that fits the budget wins; among equals the simpler one (fewer microbatches, less
ZeRO, no recompute). The order is fixed, so the same input gives the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import log

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest, count_microbatches, plain_plan, share_of_batch
from meshwright.core.result import RunnerUp, SearchResult, describe
from meshwright.core.units import format_bytes
from meshwright.cost.estimate import estimate
from meshwright.search.reasons import reason_lost

SAMPLES_PER_DEVICE = 8
"""Global batch per device where nobody gave one."""
EQUAL_SHARE = 1e-9
"""Estimates closer than this are taken as equal: rounding must not decide."""


def search(
    graph: Graph,
    cluster: Cluster,
    request: PlanRequest | None = None,
    *,
    recipe: Recipe | None = None,
    budget_bytes: int | None = None,
    world: int | None = None,
    other_casting: Graph | None = None,
) -> SearchResult:
    """The best plan for a graph on a cluster. `world` fixes the number of ranks; without it fewer devices may be used.

    other_casting: the same model as the plans that reach 16 bits in the other way run it; without it, all are costed alike.
    """
    started = time.perf_counter()
    plans = list(candidates(graph, cluster, request or PlanRequest(), world))
    graphs = {found.casting: found for found in (other_casting, graph) if found is not None}
    costed = [(plan, estimate(graphs.get(plan.casting, graph), plan, cluster, recipe, budget_bytes)) for plan in plans]
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
    devices = _num_devices(cluster, request, world)
    global_batch = request.global_batch or SAMPLES_PER_DEVICE * devices
    degrees = _degrees(request, devices, global_batch, world)
    legal = [dp for dp in degrees if request.microbatch is None or (global_batch // dp) % request.microbatch == 0]
    if not legal:
        count_microbatches(global_batch, degrees[-1], request.microbatch or 1)  # raises, with the sizes that divide
    for dp in legal:
        for part in _choices(request, global_batch // dp, dp, bool(graph.repeated_blocks)):
            wish = msgspec.structs.replace(request, global_batch=global_batch, dp=dp, **part)
            yield plain_plan(wish, graph, dp, cluster.hash)


def _num_devices(cluster: Cluster, request: PlanRequest, world: int | None) -> int:
    for axis in ("tp", "pp", "cp", "ep"):
        if (getattr(request, axis) or 1) > 1:
            raise PlanError(
                f"{axis}={getattr(request, axis)}: this version searches data-parallel plans; leave {axis} out"
            )
    devices = cluster.num_devices if world is None else world
    if not 1 <= devices <= cluster.num_devices:
        raise PlanError(f"{devices} ranks were asked for, but '{cluster.name}' has {cluster.num_devices} devices")
    return devices


def _degrees(request: PlanRequest, devices: int, global_batch: int, world: int | None) -> list[int]:
    """dp degrees that divide the batch; fewer devices than there are only where nobody fixed their number."""
    fixed = request.dp if request.dp is not None else world
    if fixed is None:
        return [degree for degree in range(1, devices + 1) if global_batch % degree == 0]
    if fixed > devices or (world is not None and fixed != world):
        raise PlanError(f"dp={fixed} was asked for, but there are {devices} ranks: make them equal")
    share_of_batch(global_batch, fixed)
    return [fixed]


def _choices(request: PlanRequest, share: int, dp: int, has_blocks: bool) -> Iterator[dict[str, object]]:
    """Values of the open fields, the plainest first."""
    microbatches = [request.microbatch] if request.microbatch else [n for n in range(share, 0, -1) if share % n == 0]
    recomputes = [request.recompute] if request.recompute else (["none", "full"] if has_blocks else ["none"])
    for microbatch in microbatches:
        for zero in _zero_stages(request, dp):
            for recompute in recomputes:
                yield {"microbatch": microbatch, "zero": zero, "recompute": recompute}


def _zero_stages(request: PlanRequest, dp: int) -> list[int]:
    if request.zero is not None:
        return [request.zero]
    if request.hybrid is not None:
        return [1, 2, 3]
    return [0, 1, 2, 3] if dp > 1 else [0]


def _preference(pair: tuple[Plan, Estimate]) -> tuple[int, int, int, int, float]:
    """Fastest first; times equal but for rounding leave it to the simpler plan."""
    plan, found = pair
    speed = round(log(found.step_seconds) / EQUAL_SHARE)
    return (speed, plan.num_microbatches, plan.zero, len(plan.recompute), found.step_seconds)


def _infeasible(missing: list[tuple[Plan, Estimate]], cluster: Cluster) -> InfeasibleError:
    plan, found = missing[0]
    needed = found.needed_bytes
    parts = msgspec.structs.asdict(found.memory_bytes)
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    words = ", ".join(f"{name.replace('_', ' ')} {format_bytes(parts[name])}" for name in largest)
    return InfeasibleError(
        f"none of {len(missing)} candidates fits {format_bytes(found.budget_bytes)} per device on {cluster.num_devices} × "
        f"{cluster.device.name}. The nearest miss ({describe(plan)}) needs {format_bytes(needed)}, "
        f"{format_bytes(needed - found.budget_bytes)} too much, most of it {words}. "
        "Use more devices, a smaller global batch, bf16, or a larger --memory"
    )
