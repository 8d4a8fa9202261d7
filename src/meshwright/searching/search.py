"""Choose a plan by one of several methods, and say why each runner-up lost.

Every method returns plans with their estimates. This file decides which of them is taken (choice.py). The order is fixed, so the
same input gives the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, InputError, nearest
from meshwright.core.estimate import Estimate
from meshwright.core.graph import PRECISION_BYTES, Graph
from meshwright.core.legal import LegalSharding
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.core.result import Claim, RunnerUp, SearchProgress, SearchResult, describe
from meshwright.core.units import format_bytes
from meshwright.cost.origin import error_band
from meshwright.searching.choice import Costed, chosen, each_once, ordered, varied
from meshwright.searching.infeasible.suggestions import infeasible, largest_parts
from meshwright.searching.joint.joint import joint
from meshwright.searching.problem import Method, Outcome, Problem
from meshwright.searching.reasons import reason_lost

COMPARISON_METHODS = {
    "exhaustive": "meshwright.searching.methods.exhaustive",
    "placement": "meshwright.searching.methods.placement",
    "profile": "meshwright.searching.methods.profile",
    "policy": "meshwright.searching.methods.policy",
}
"""Methods that the joint search is compared with: name → module, where the method's function has the same name. A module is loaded
when its method is asked for."""
METHODS = ("joint", *COMPARISON_METHODS)
ROUNDING = 1e-12
"""A bound is added up in another order than the step it bounds."""


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
    watch: Callable[[SearchProgress], None] | None = None,
) -> SearchResult:
    """The best plan for a graph on a cluster. `world` fixes the number of ranks; without it fewer devices may be used.

    other_casting: the same model as the plans that reach 16 bits in the other way run it; without it, all are costed alike.
    legal: what the runtime answered about shardings.
    prefer_fastest: take the fastest even where its gain over a simpler plan is within the estimate's own error.
    watch: told how far the search has come.
    """
    run = method_named(method)
    started = time.perf_counter()
    problem = Problem(
        graph,
        cluster,
        request or PlanRequest(),
        recipe or Recipe(),
        budget_bytes,
        world,
        other_casting,
        legal,
        prefer_fastest,
        watch=watch,
    )
    result = _result(_outcome(run, problem), problem, method)
    return msgspec.structs.replace(result, search_seconds=time.perf_counter() - started)


def method_named(name: str) -> Method:
    if name == "joint":
        return joint
    if name not in COMPARISON_METHODS:
        raise InputError(f"no search is called '{name}': {nearest(name, METHODS)}")
    method: Method = getattr(import_module(COMPARISON_METHODS[name]), name)
    return method


def _outcome(method: Method, problem: Problem) -> Outcome:
    """What the method finds. Plans for one device alone are a search of their own where such a device is another than one of many:
    bounds of the others do not hold for them."""
    one = problem.of_one_device
    if one is None:
        return method(problem)
    found, of_one = method(problem), method(one)
    plans = [(msgspec.structs.replace(plan, cluster=problem.cluster_hash), made) for plan, made in of_one.costed]
    bounds = (found.bound_seconds, of_one.bound_seconds)
    return Outcome(
        costed=(*plans, *(pair for pair in found.costed if pair[0].world > 1)),
        num_candidates=found.num_candidates + of_one.num_candidates,
        bound_seconds=None if None in bounds else min(bound for bound in bounds if bound is not None),
        left_out=tuple(dict.fromkeys((*found.left_out, *of_one.left_out))),
    )


def _result(outcome: Outcome, problem: Problem, method: str) -> SearchResult:
    costed = each_once(outcome.costed)
    fitting = ordered([pair for pair in costed if pair[1].fits])
    missing = sorted((pair for pair in costed if not pair[1].fits), key=lambda pair: pair[1].peak_bytes)
    if not fitting:
        raise _infeasible(missing, problem)
    band = 0.0 if problem.prefer_fastest else error_band(problem.cluster)
    plan, best = chosen(fitting, band)
    others = [pair for pair in varied(fitting) if pair[0] is not plan]
    return SearchResult(
        plan=plan,
        estimate=best,
        runners_up=tuple(_runner_up(pair, (plan, best), band) for pair in (*others, *missing)),
        num_candidates=outcome.num_candidates,
        search_seconds=0.0,
        method=method,
        num_costed=len(costed),
        claim=_claim(outcome, fitting[0][1].step_seconds, best.step_seconds),
        remark=_remark(fitting[0], (plan, best), band),
    )


def _runner_up(other: Costed, best: Costed, band: float) -> RunnerUp:
    plan, found = other
    return RunnerUp(
        plan=plan,
        step_seconds=found.step_seconds,
        peak_bytes=found.peak_bytes,
        reason=reason_lost(found, best[1], plan=plan, band=band),
        fits=found.fits,
    )


def _claim(outcome: Outcome, fastest_seconds: float, chosen_seconds: float) -> Claim:
    """The gap is that of the chosen plan. A search is complete where no plan can be faster than the fastest it has found."""
    bound = outcome.bound_seconds
    if bound is None:
        return Claim(left_out=outcome.left_out)
    proven = _share_above(fastest_seconds, bound) == 0
    return Claim(
        complete=proven and not outcome.left_out,
        gap=_share_above(chosen_seconds, min(bound, fastest_seconds)),
        left_out=outcome.left_out,
    )


def _share_above(seconds: float, bound_seconds: float) -> float:
    share = float(seconds / bound_seconds) - 1
    return share if share > ROUNDING else 0.0


def _remark(fastest: Costed, taken: Costed, band: float) -> str:
    if taken[0] is fastest[0]:
        return ""
    gain = 1 - fastest[1].step_seconds / taken[1].step_seconds
    return (
        f"{describe(fastest[0])} is estimated {gain:.1%} faster, less than the estimate's error of {band:.0%}, and more "
        "complicated: --prefer-fastest takes it"
    )


def _infeasible(missing: list[tuple[Plan, Estimate]], problem: Problem) -> InfeasibleError:
    plan, found = missing[0]
    cluster = problem.cluster
    needed = found.needed_bytes
    return InfeasibleError(
        f"none of {len(missing)} candidates fits {format_bytes(found.budget_bytes)} per device on {cluster.num_devices} × "
        f"{cluster.device.name}. The nearest miss ({describe(plan)}) needs {format_bytes(needed)}, "
        f"{format_bytes(needed - found.budget_bytes)} too much, most of it {', '.join(largest_parts(found))}. "
        f"Use more devices, a smaller global batch, {'bf16, ' if PRECISION_BYTES[plan.precision] > 2 else ''}or a larger --memory",
        infeasible(problem, plan, found, len(missing)),
    )
