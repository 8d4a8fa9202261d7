"""How much of the optimizer's state leaves the device: no more than must, since what stays is updated where it is, at once.

Plans are searched with all of it on the host, which is what fits best; of the fastest that fit so, the share is then lowered to
the least that still fits.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from meshwright.core.plan import Plan
from meshwright.search.choice import Costed, ordered
from meshwright.search.problem import Outcome, Problem

STEPS = 50
"""Shares are multiples of 1 / STEPS."""
MOST_PLANS = 3


def with_least_shares(outcome: Outcome, problem: Problem) -> Outcome:
    """The same plans, and the fastest offloaded ones once more with as much state on the device as fits."""
    if problem.request.offload_share is not None:
        return outcome
    away = ordered([pair for pair in outcome.costed if pair[0].offload.what == "optimizer" and pair[1].fits])
    found = [better for pair in away[:MOST_PLANS] if (better := _least(pair, problem)) is not None]
    return replace(outcome, costed=(*found, *outcome.costed)) if found else outcome


def _least(pair: Costed, problem: Problem) -> Costed | None:
    """By bisection: a larger share on the device never takes less of it."""
    best, fits, misses = None, STEPS, -1
    while fits - misses > 1:
        number = (fits + misses) // 2
        plan = _with_share(pair[0], number / STEPS)
        found = problem.cost(plan)
        if found.fits and problem.hosts_hold(found.host_bytes):
            best, fits = (plan, found), number
        else:
            misses = number
    return best


def _with_share(plan: Plan, share: float) -> Plan:
    return msgspec.structs.replace(plan, offload=msgspec.structs.replace(plan.offload, share=share))
