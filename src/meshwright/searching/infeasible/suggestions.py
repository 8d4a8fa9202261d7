"""Suggestions where nothing fits: the cheapest changes that make the nearest miss fit.

The nearest miss is the plan with the least peak memory. Each change of it is costed as a plan, never guessed:

    recompute    the fewest blocks, from the first or from the last, whose recompute makes it fit          -> _recomputes
    microbatch   the largest divisor of the microbatch that fits                                           -> _microbatches
    sequence     sequence parallel, with tp, where the runtime does not refuse it                          -> _sequence_parallel
    ZeRO         the lowest higher stage that fits, or one sharding group in place of several              -> _shardings
    offload      optimizer state, then parameters too, where the hosts have the memory                     -> offload_suggestions.py
    budget       all the device has, where less was given                                                  -> _budgets
    hosts        the fewest more, dp raised, with the plan's ZeRO stage, stage 1 or stage 3                 -> _hosts

Where no single change fits, two or more that need no more devices are made together, then with offload     -> _together
Suggestions are ordered by cost: devices × seconds per step. Those that cannot run yet come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import msgspec

from meshwright.core.estimate import Estimate
from meshwright.core.names import compact_names
from meshwright.core.plan import Offload, Plan, Recompute, RecomputeMode
from meshwright.core.result import Infeasible, WayOut
from meshwright.core.units import ceil_div, format_bytes
from meshwright.rules.divisors import divisors
from meshwright.rules.limits import not_yet
from meshwright.searching.infeasible.changes import Change, costed, first_that_fits
from meshwright.searching.infeasible.offload_suggestions import offloads
from meshwright.searching.plan_builder import rules_of
from meshwright.searching.problem import Problem

MOST_TIMES_MORE = 64
"""How many times more devices are tried."""
MODES: tuple[RecomputeMode, ...] = ("selective", "full")


def infeasible(problem: Problem, plan: Plan, estimate: Estimate, num_candidates: int) -> Infeasible:
    """The nearest miss with its suggestions."""
    return Infeasible(
        plan=plan,
        estimate=estimate,
        binding=binding_constraint(estimate),
        num_candidates=num_candidates,
        ways_out=ways_out(problem, plan, estimate),
    )


def binding_constraint(estimate: Estimate) -> str:
    """Which device is over the budget, when, by how much, and what fills it."""
    filled = " and ".join(largest_parts(estimate))
    moment = f", {estimate.worst_moment}" if estimate.worst_moment else ""
    over = format_bytes(estimate.needed_bytes - estimate.budget_bytes)
    return f"memory of rank {estimate.worst_rank}{moment}: {over} over {format_bytes(estimate.budget_bytes)}, most of it {filled}"


def largest_parts(estimate: Estimate) -> list[str]:
    """The two categories of memory that have most bytes, in words. What no tensor uses counts too."""
    parts = {
        **msgspec.structs.asdict(estimate.memory_bytes),
        "driver and communicators": estimate.context_bytes,
        "the allocator's slack": estimate.reserved_bytes - estimate.peak_bytes,
    }
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    return [f"{name.replace('_', ' ')} {format_bytes(parts[name])}" for name in largest]


def ways_out(problem: Problem, plan: Plan, estimate: Estimate) -> tuple[WayOut, ...]:
    """Changes that make a plan fit, the cheapest first. Where none does, the one that comes nearest, if it saves anything."""
    makers = (_recomputes, _microbatches, _shardings, _sequence_parallel, offloads, _budgets, _hosts)
    tried = [change for make in makers for change in make(problem, plan)]
    fitting = [change for change in tried if change.fits]
    if not fitting:
        tried += _together(problem, plan)
        fitting = [change for change in tried if change.fits]
    if not fitting:
        nearest = min(tried, key=lambda change: change.estimate.needed_bytes, default=None)
        return (_way_out(nearest, problem, estimate),) if nearest and _helps(nearest, estimate) else ()
    ordered = sorted(fitting, key=lambda change: (bool(not_yet(change.plan)), change.cost, change.words))
    return tuple(_way_out(change, problem, estimate) for change in ordered)


def _helps(change: Change, estimate: Estimate) -> bool:
    return change.estimate.needed_bytes < estimate.needed_bytes


def _way_out(change: Change, problem: Problem, miss: Estimate) -> WayOut:
    fixed = [name for name in change.changes if getattr(problem.request, name, None) is not None]
    return WayOut(
        words=change.words,
        plan=change.plan,
        estimate=change.estimate,
        num_hosts=change.problem.cluster.num_hosts,
        saved_bytes=miss.needed_bytes - change.estimate.needed_bytes,
        slower_share=change.estimate.step_seconds / miss.step_seconds - 1,
        leave_out=tuple(f"--{name.replace('_', '-')}" for name in fixed),
        not_yet=tuple(not_yet(change.plan)),
    )


# Single changes. Each yields what fits, or, where nothing does, what comes nearest.


def _recomputes(problem: Problem, plan: Plan) -> Iterator[Change]:
    blocks = [name for name in plan.blocks if name in set(problem.graph.repeated_blocks)]
    for mode in MODES:
        ends = (lambda count: blocks[:count], lambda count: blocks[len(blocks) - count :])
        found = [change for pick in ends if (change := _fewest(problem, plan, mode, len(blocks), pick))]
        if found:
            yield min(found, key=lambda change: (not change.fits, change.estimate.step_seconds))


def _fewest(
    problem: Problem, plan: Plan, mode: RecomputeMode, num_blocks: int, pick: Callable[[int], Sequence[str]]
) -> Change | None:
    """The fewest blocks whose recompute makes the plan fit, by bisection: more recompute never needs more memory."""

    def recomputed(count: int) -> Change | None:
        rules, added = _with_recompute(plan, mode, pick(count))
        words = f"{mode} recompute of {', '.join(compact_names(added))}"
        return costed(words, problem, plan, ("recompute",), recompute=rules) if added else None

    best, low, high = recomputed(num_blocks), 0, num_blocks
    while best is not None and best.fits and high - low > 1:
        middle = (low + high) // 2
        change = recomputed(middle)
        if change is not None and change.fits:
            best, high = change, middle
        else:
            low = middle
    return best


def _with_recompute(plan: Plan, mode: RecomputeMode, names: Sequence[str]) -> tuple[tuple[Recompute, ...], list[str]]:
    """The plan's rules with these blocks under a mode too, and the blocks that are new. Fully recomputed blocks stay so."""
    full, chosen = plan.recomputed("full"), frozenset(names)
    selective = plan.recomputed("selective")
    added = [name for name in names if name not in full and not (mode == "selective" and name in selective)]
    modes: dict[RecomputeMode, frozenset[str]] = {"selective": selective, "full": full}
    modes[mode] |= chosen
    modes["selective"] -= modes["full"]
    return rules_of(plan.blocks, modes), added


def _microbatches(problem: Problem, plan: Plan) -> Iterator[Change]:
    yield from first_that_fits(
        costed(
            f"microbatches of {size}, {plan.num_microbatches * plan.microbatch // size} of them",
            problem,
            plan,
            ("microbatch",),
            microbatch=size,
            num_microbatches=plan.num_microbatches * plan.microbatch // size,
        )
        for size in reversed(divisors(plan.microbatch)[:-1])
    )


def _shardings(problem: Problem, plan: Plan) -> Iterator[Change]:
    if plan.mesh.dp * plan.mesh.cp == 1:
        return
    yield from first_that_fits(
        costed(f"ZeRO {stage}", problem, plan, ("zero",), zero=stage) for stage in range(plan.zero + 1, 4)
    )
    if plan.hybrid:
        words = f"ZeRO {plan.zero} over all {plan.mesh.dp * plan.mesh.cp} ranks, not in groups of {plan.hybrid}"
        yield from first_that_fits([costed(words, problem, plan, ("hybrid",), hybrid=None)])


def _budgets(problem: Problem, plan: Plan) -> Iterator[Change]:
    memory = problem.cluster.device.memory_bytes
    if problem.budget_bytes is not None and problem.budget_bytes < memory:
        words = f"all of the device's {format_bytes(memory)} in place of --memory {format_bytes(problem.budget_bytes)}"
        yield from first_that_fits([costed(words, replace(problem, budget_bytes=None), plan, ())])


def _hosts(problem: Problem, plan: Plan) -> Iterator[Change]:
    """dp raised by the least factor that fits; nothing where the request fixes the number of ranks."""
    if problem.world is not None:
        return
    share = plan.global_batch // plan.mesh.dp
    factors = [factor for factor in range(2, min(share, MOST_TIMES_MORE) + 1) if share % factor == 0]
    yield from first_that_fits(
        _on_more(problem, plan, factor, zero)
        for factor in factors
        for zero in sorted({plan.zero, max(plan.zero, 1), 3})
    )


def _on_more(problem: Problem, plan: Plan, factor: int, zero: int) -> Change | None:
    cluster = problem.cluster
    hosts = max(cluster.num_hosts, ceil_div(plan.world * factor, cluster.devices_per_host))
    larger = replace(problem, cluster=msgspec.structs.replace(cluster, num_hosts=hosts))
    mesh = plan.mesh
    dp, share = mesh.dp * factor, plan.global_batch // (mesh.dp * factor)
    microbatch = max(size for size in divisors(share) if size <= plan.microbatch)
    more = hosts - cluster.num_hosts
    where = f"{more} more host{'' if more == 1 else 's'}" if more else "the devices that are idle"
    sharded = f" and ZeRO {zero}" if zero != plan.zero else ""
    return costed(
        f"{where}, with dp {dp}{sharded}",
        larger,
        plan,
        ("dp", *(("zero",) if zero != plan.zero else ())),
        cluster=larger.cluster.hash,
        mesh=msgspec.structs.replace(mesh, dp=dp),
        microbatch=microbatch,
        num_microbatches=share // microbatch,
        zero=zero,
    )


def _sequence_parallel(problem: Problem, plan: Plan) -> Iterator[Change]:
    if saving := _savings(problem, plan).get("sequence parallel"):
        yield from first_that_fits([costed("sequence parallel", problem, plan, tuple(saving), **saving)])


def _together(problem: Problem, plan: Plan) -> Iterator[Change]:
    """All combinations of two or more savings; where none fits, all savings with offload too."""
    savings = _savings(problem, plan)
    groups = [group for size in range(2, len(savings) + 1) for group in combinations(savings, size)]
    tried = [_all_of(problem, plan, savings, group) for group in groups]
    if not any(change is not None and change.fits for change in tried):
        away: dict[str, dict[str, Any]] = {
            "offload optimizer": {"offload": Offload(what="optimizer")},
            "offload parameters": {"offload": Offload(what="parameters", stash="host")},
        }
        tried += [_all_of(problem, plan, savings | away, (*savings, name)) for name in away]
    return (change for change in tried if change is not None)


def _savings(problem: Problem, plan: Plan) -> dict[str, dict[str, Any]]:
    """The change of each kind that saves most memory on the same devices: words → fields of the plan. What the plan has already is
    left out."""
    blocks = [name for name in plan.blocks if name in set(problem.graph.repeated_blocks)]
    rules, added = _with_recompute(plan, "full", blocks)
    found: dict[str, dict[str, Any]] = {}
    if added:
        found["full recompute"] = {"recompute": rules}
    if plan.microbatch > 1:
        found["microbatches of 1"] = {"microbatch": 1, "num_microbatches": plan.microbatch * plan.num_microbatches}
    if plan.zero < 3 and plan.mesh.dp * plan.mesh.cp > 1:
        found["ZeRO 3"] = {"zero": 3}
    answer = problem.answer((plan.mesh.tp, plan.mesh.cp, True, plan.context))
    if plan.mesh.tp > 1 and not plan.sequence_parallel and not (answer and answer.refusal):
        found["sequence parallel"] = {"sequence_parallel": True, **({"sharding": answer.sharding} if answer else {})}
    return found


def _all_of(problem: Problem, plan: Plan, savings: dict[str, dict[str, Any]], names: Sequence[str]) -> Change | None:
    changes = {field: value for name in names for field, value in savings[name].items()}
    return costed(" and ".join(names), problem, plan, tuple(changes), **changes)
