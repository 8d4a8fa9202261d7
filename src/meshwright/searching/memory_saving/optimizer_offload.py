"""Which share of the optimizer's state is offloaded.

State on the device is updated there, without a transfer. Offloaded state makes room for activations, which then need no recompute.
So the search chooses the share together with the recompute, for every candidate, before it compares candidates. Shares are
multiples of 1 / STEPS, and the state of one parameter is offloaded as a whole or not at all (rules/groups.py). Where parameters
are in 16 bits, a share of 0 also differs from no offload: the master weights stay on the device too.

    few shares that differ   each gets the least recompute that fits, and the fastest is taken: exact   -> shares_of
    many                     the same on a coarse grid; then, with the recompute of the fastest, as little is offloaded as fits
                                                                                                        -> _refined
A smaller share needs no less device memory and no less recompute. So other shares are not tried for a candidate whose step, without
its transfers and update, is not faster than the best plan                                              -> _least_seconds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.cost.memory.rank_state import RankState
from meshwright.searching.choice import Costed
from meshwright.searching.problem import Problem

STEPS = 50
COARSE_STEPS = 5
FEW_SHARES = 8

Fit = Callable[[Plan], Costed | None]
"""A plan → the same with the recompute it needs, and its estimate; None where no recompute makes it fit."""


def with_best_share(problem: Problem, plan: Plan, fit: Fit, limit_seconds: float) -> Costed | None:
    """The plan with the fastest share that fits the device and the host; where none fits, all state is offloaded. limit_seconds:
    slower plans are of no interest."""
    whole = fit(plan)
    if problem.request.offload_share is not None or whole is None or not whole[1].fits:
        return whole
    if _least_seconds(whole[1]) >= limit_seconds:
        return whole
    shares = shares_of(problem, plan)
    if len(shares) > FEW_SHARES:
        return _refined(problem, plan, fit, whole)
    return _fastest(problem, [whole, *_fitting(plan, fit, shares[1:])])


def shares_of(problem: Problem, plan: Plan) -> list[float]:
    """The shares that offload different bytes, the largest first. Where the model has many parameters, all shares."""
    every = [number / STEPS for number in range(STEPS, _least_number(plan) - 1, -1)]
    if sum(parameter.trainable for parameter in problem.graph.parameters) >= STEPS:
        return every
    found: dict[tuple[int, ...], float] = {}
    for share in every:
        found.setdefault(_leaving(problem, _with_share(plan, share)), share)
    return list(found.values())


def coarse_shares(plan: Plan) -> list[float]:
    """The shares of the coarse grid, the largest first."""
    return [number / COARSE_STEPS for number in range(COARSE_STEPS, _least_number(plan) - 1, -1)]


def _least_number(plan: Plan) -> int:
    """The least share, as a number of steps."""
    return 0 if plan.stores_16_bits else 1


def _leaving(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """How much state is offloaded from the ranks of every coordinate."""
    graph = problem.graph_of(plan)
    return tuple(RankState(graph, plan, problem.recipe, place).num_shipped for place in range(plan.mesh.pp))


def _least_seconds(whole: Estimate) -> float:
    parts = whole.time_seconds
    return whole.step_seconds - parts.transfer - parts.update


def _fitting(plan: Plan, fit: Fit, shares: list[float]) -> Iterator[Costed]:
    """The plan under each share, up to the first that does not fit: smaller shares do not fit either."""
    for share in shares:
        found = fit(_with_share(plan, share))
        if found is None or not found[1].fits:
            return
        yield found


def _fastest(problem: Problem, found: list[Costed]) -> Costed | None:
    """The fastest plan that the hosts have memory for; among equals, the one with the largest share."""
    held = [pair for pair in found if problem.hosts_hold(pair[1].host_bytes)]
    return min(held, key=lambda pair: pair[1].step_seconds, default=None)


def _refined(problem: Problem, plan: Plan, fit: Fit, whole: Costed) -> Costed | None:
    best = _fastest(problem, [whole, *_fitting(plan, fit, coarse_shares(plan)[1:])])
    if best is None:
        return None
    less = with_least_share(best, problem, round((best[0].offload.share - 1 / COARSE_STEPS) * STEPS))
    return best if less is None else min(best, less, key=lambda pair: pair[1].step_seconds)


def with_least_share(pair: Costed, problem: Problem, misses: int = -1) -> Costed | None:
    """The same plan with as much of the optimizer's state on the device as fits; None where no more fits.

    By bisection: a larger share on the device never takes less memory there. misses: a number of steps that is known not to fit.
    """
    best, fits = None, round(pair[0].offload.share * STEPS)
    misses = max(misses, _least_number(pair[0]) - 1)
    while fits - misses > 1:
        number = (fits + misses) // 2
        plan = _with_share(pair[0], number / STEPS)
        found = problem.cost(plan)
        if found.fits:
            best, fits = (plan, found), number
        else:
            misses = number
    return best if best is not None and problem.hosts_hold(best[1].host_bytes) else None


def _with_share(plan: Plan, share: float) -> Plan:
    return msgspec.structs.replace(plan, offload=msgspec.structs.replace(plan.offload, share=share))
