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
"""Of sums in another order: plans that differ by less take equally long."""


def reason_lost(lost: Estimate, best: Estimate, *, plan: Plan | None = None, band: float = 0.0) -> str:
    """The memory it is over, or the part of the step that costs it most against the best. plan: the one that lost."""
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
