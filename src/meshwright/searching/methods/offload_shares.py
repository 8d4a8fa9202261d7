"""How much of the optimizer's state is offloaded, for the methods that do not decide it themselves."""

from __future__ import annotations

from dataclasses import replace

from meshwright.searching.choice import ordered
from meshwright.searching.memory_saving.optimizer_offload import with_least_share
from meshwright.searching.problem import Outcome, Problem

MOST_PLANS = 3
"""Plans, the fastest first, that are tried with less offload."""


def with_least_shares(outcome: Outcome, problem: Problem) -> Outcome:
    """Adds the fastest plans that offload the optimizer's state, with as much of it on the device as fits."""
    if problem.request.offload_share is not None:
        return outcome
    away = ordered([pair for pair in outcome.costed if pair[0].offload.what == "optimizer" and pair[1].fits])
    found = [better for pair in away[:MOST_PLANS] if (better := with_least_share(pair, problem)) is not None]
    return replace(outcome, costed=(*found, *outcome.costed)) if found else outcome
