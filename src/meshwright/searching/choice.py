"""Which of the costed plans is taken, and in which order the others are shown.

The fastest that fits, unless a simpler one is as fast within the estimate's own error: a complicated plan has to earn its keep.
How complicated: the mechanisms it uses, counted                                                -> complexity
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from meshwright.core.axes import MODEL_AXES
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan

Costed = tuple[Plan, Estimate]

EQUAL_SHARE = 1e-9
"""Estimates closer than this are taken as equal: rounding must not decide."""


def complexity(plan: Plan) -> int:
    """Two for each axis beside dp and for offload, one for every other mechanism."""
    axes = sum(axis in MODEL_AXES for axis in plan.mesh.used)
    others = (
        plan.zero > 0,
        plan.zero > 2,
        plan.hybrid is not None,
        plan.sequence_parallel,
        bool(plan.recompute),
        len(plan.recompute) > 1,
        plan.schedule != "1f1b",
        plan.virtual > 1,
        plan.compile,
    )
    return 2 * axes + 2 * (plan.offload.what != "none") + sum(others)


def each_once(costed: Iterable[Costed]) -> list[Costed]:
    """Parts of a search that look at the same plan find it twice."""
    return list(dict(costed).items())


def ordered(fitting: list[Costed]) -> list[Costed]:
    """Fastest first; times equal but for rounding leave it to the simpler plan."""
    return sorted(fitting, key=_preference)


def _preference(pair: Costed) -> tuple[int, int, int, int, float]:
    plan, found = pair
    speed = round(log(found.step_seconds) / EQUAL_SHARE)
    return (speed, complexity(plan), plan.num_microbatches, plan.zero, found.step_seconds)


def chosen(fastest_first: list[Costed], band: float) -> Costed:
    """The simplest of those within the band of the fastest; of equally simple ones the fastest."""
    limit = fastest_first[0][1].step_seconds * (1 + band)
    near = [pair for pair in fastest_first if pair[1].step_seconds <= limit]
    return min(near, key=lambda pair: complexity(pair[0]))


def varied(fastest_first: list[Costed]) -> list[Costed]:
    """The best of every mesh, then the second best of every mesh, and so on: the first few show different answers."""
    seen: dict[object, int] = {}
    turns = []
    for place, (plan, _) in enumerate(fastest_first):
        turn = seen.get(plan.mesh, 0)
        seen[plan.mesh] = turn + 1
        turns.append((turn, place))
    return [fastest_first[place] for _, place in sorted(turns)]
