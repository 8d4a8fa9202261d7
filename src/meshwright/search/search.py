"""Choose a plan by one of several methods, and say why each runner-up lost.

The fastest plan that fits the budget wins; among equals the simpler one (fewer microbatches, less ZeRO, no recompute). The
order is fixed, so the same input gives the same plan.
"""

from __future__ import annotations

import time
from math import log

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, InputError, nearest
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.legal import LegalSharding
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.core.result import RunnerUp, SearchResult, describe
from meshwright.core.units import format_bytes
from meshwright.search.joint import joint
from meshwright.search.problem import Method, Outcome, Problem
from meshwright.search.reasons import reason_lost
from meshwright.search.ways_out import infeasible

EQUAL_SHARE = 1e-9
"""Estimates closer than this are taken as equal: rounding must not decide."""
METHODS: dict[str, Method] = {"joint": joint}


def search(
    graph: Graph,
    cluster: Cluster,
    request: PlanRequest | None = None,
    *,
    recipe: Recipe | None = None,
    budget_bytes: int | None = None,
    world: int | None = None,
    other_casting: Graph | None = None,
    legal: tuple[LegalSharding, ...] = (),
    method: str = "joint",
    prefer_fastest: bool = False,
) -> SearchResult:
    """The best plan for a graph on a cluster. `world` fixes the number of ranks; without it fewer devices may be used.

    other_casting: the same model as the plans that reach 16 bits in the other way run it; without it, all are costed alike.
    legal: what the runtime answered about shardings.
    prefer_fastest: take the fastest even where its gain over a simpler plan is within the estimate's own error.
    """
    started = time.perf_counter()
    if method not in METHODS:
        raise InputError(f"no search is called '{method}': {nearest(method, METHODS)}")
    problem = Problem(
        graph, cluster, request or PlanRequest(), recipe or Recipe(), budget_bytes, world, other_casting, legal
    )
    outcome = METHODS[method](problem)
    return _result(outcome, problem, time.perf_counter() - started)


def _result(outcome: Outcome, problem: Problem, seconds: float) -> SearchResult:
    fitting = sorted((pair for pair in outcome.costed if pair[1].fits), key=_preference)
    missing = sorted((pair for pair in outcome.costed if not pair[1].fits), key=lambda pair: pair[1].peak_bytes)
    if not fitting:
        raise _infeasible(missing, problem)
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
        num_candidates=outcome.num_candidates,
        search_seconds=seconds,
    )


def _preference(pair: tuple[Plan, Estimate]) -> tuple[int, int, int, int, float]:
    """Fastest first; times equal but for rounding leave it to the simpler plan."""
    plan, found = pair
    speed = round(log(found.step_seconds) / EQUAL_SHARE)
    return (speed, plan.num_microbatches, plan.zero, len(plan.recompute), found.step_seconds)


def _infeasible(missing: list[tuple[Plan, Estimate]], problem: Problem) -> InfeasibleError:
    plan, found = missing[0]
    cluster = problem.cluster
    needed = found.needed_bytes
    parts = msgspec.structs.asdict(found.memory_bytes)
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    words = ", ".join(f"{name.replace('_', ' ')} {format_bytes(parts[name])}" for name in largest)
    return InfeasibleError(
        f"none of {len(missing)} candidates fits {format_bytes(found.budget_bytes)} per device on {cluster.num_devices} × "
        f"{cluster.device.name}. The nearest miss ({describe(plan)}) needs {format_bytes(needed)}, "
        f"{format_bytes(needed - found.budget_bytes)} too much, most of it {words}. "
        "Use more devices, a smaller global batch, bf16, or a larger --memory",
        infeasible(problem, plan, found, len(missing)),
    )
