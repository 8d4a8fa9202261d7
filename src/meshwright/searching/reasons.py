"""Why a candidate lost to the chosen plan, in one line."""

from __future__ import annotations

import msgspec

from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.units import format_bytes, format_seconds

WORDS = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "exposed_gather": "gathering parameters",
    "exposed_reduce": "communication in backward",
    "exposed_inner": "communication inside the blocks",
    "bubble": "bubble",
    "transfer": "transfers",
    "update": "the optimizer's update",
    "other": "other work",
}


ROUNDING = 1e-12
"""Sums in another order round differently: plans that differ by less than this share take equally long."""


def reason_lost(lost: Estimate, best: Estimate, *, plan: Plan | None = None, band: float = 0.0) -> str:
    """By how much the plan is over the budget, or the part of the step in which it loses most time to the best plan. plan: the one
    that lost."""
    if not lost.fits:
        over = lost.needed_bytes - lost.budget_bytes
        where = f" in the {lost.worst_moment}" if lost.worst_moment else ""
        return f"{format_bytes(over)} over the budget of {format_bytes(lost.budget_bytes)}{where}"
    slower = lost.step_seconds / best.step_seconds - 1
    if abs(slower) < ROUNDING:
        return "equally fast, less plain"
    if slower < 0:
        return f"{-slower:.1%} faster, within the estimate's error of {band:.0%}, and more complicated"
    gains = _differences(lost, best)
    part, seconds = max(gains.items(), key=lambda item: item[1])
    many = f" at {plan.num_microbatches} microbatches" if plan is not None and part == "bubble" else ""
    return f"+{slower:.1%} time: +{format_seconds(seconds)} for {WORDS[part]}{many}"


def _differences(lost: Estimate, best: Estimate) -> dict[str, float]:
    one, other = (msgspec.structs.asdict(found.time_seconds) for found in (lost, best))
    return {part: one[part] - other[part] for part in one}
