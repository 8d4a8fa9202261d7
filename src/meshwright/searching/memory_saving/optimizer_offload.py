"""Which share of the optimizer's state leaves the device.

What stays is updated where it is, at once; what leaves makes room for activations, that need no recompute then. So the share is
chosen with the recompute, for every draft, before drafts are compared. Shares are multiples of 1 / STEPS, and whole parameters stay
or leave (rules/offloaded.py). A share of 0 is a way of its own to train where parameters are in 16 bits: their masters stay too.

    few that differ   each is fitted with the least recompute, and the fastest taken: exact        -> shares_of
    many              the same on a coarse grid; then, with the recompute of the fastest, as little leaves as fits
                                                                                                   -> _refined
A smaller share takes no less of the device, and needs no less recompute: a draft whose step, less its transfers and update, is not
faster than the best plan is not looked at under other shares                                      -> _least_seconds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.cost.holdings import Holdings
from meshwright.searching.choice import Costed
from meshwright.searching.problem import Problem

STEPS = 50
COARSE_STEPS = 5
FEW_SHARES = 8

Fit = Callable[[Plan], Costed | None]
"""A plan with the recompute it needs and its estimate; None where nothing makes it fit."""


def with_best_share(problem: Problem, plan: Plan, fit: Fit, limit_seconds: float) -> Costed | None:
    """The fastest that fits device and host; where no share does, all of it. limit_seconds: slower ones are of no interest."""
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
    """Those that differ in what leaves, the largest first; where the model has many parameters, all."""
    every = [number / STEPS for number in range(STEPS, _least_number(plan) - 1, -1)]
    if sum(parameter.trainable for parameter in problem.graph.parameters) >= STEPS:
        return every
    found: dict[tuple[int, ...], float] = {}
    for share in every:
        found.setdefault(_leaving(problem, _with_share(plan, share)), share)
    return list(found.values())


def coarse_shares(plan: Plan) -> list[float]:
    """The largest first."""
    return [number / COARSE_STEPS for number in range(COARSE_STEPS, _least_number(plan) - 1, -1)]


def _least_number(plan: Plan) -> int:
    """Of steps."""
    return 0 if plan.stores_16_bits else 1


def _leaving(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """How much leaves the ranks of every coordinate."""
    graph = problem.graph_of(plan)
    return tuple(Holdings(graph, plan, problem.recipe, place).num_shipped for place in range(plan.mesh.pp))


def _least_seconds(whole: Estimate) -> float:
    parts = whole.time_seconds
    return whole.step_seconds - parts.transfer - parts.update


def _fitting(plan: Plan, fit: Fit, shares: list[float]) -> Iterator[Costed]:
    """Down to the first that does not fit: those below it do neither."""
    for share in shares:
        found = fit(_with_share(plan, share))
        if found is None or not found[1].fits:
            return
        yield found


def _fastest(problem: Problem, found: list[Costed]) -> Costed | None:
    """Of those that the hosts hold; the largest share of equals."""
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
