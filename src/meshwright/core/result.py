"""A SearchResult: the plan, what it is predicted to cost, and why every other candidate lost."""

from __future__ import annotations

from typing import Literal

from meshwright.core.bounds import LARGEST_RECORD_BYTES, CountOrZero, NotNegative
from meshwright.core.claim import Claim
from meshwright.core.codec import Value
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.units import format_bytes, format_seconds


class RunnerUp(Value, kw_only=True):
    """A plan that was considered and lost, with the reason."""

    plan: Plan
    step_seconds: NotNegative
    peak_bytes: CountOrZero
    reason: str
    fits: bool = True


class SearchResult(Value, kw_only=True):
    """The answer of a search: the plan, its estimate, why every other candidate lost, and what was proven about it.

    `print(result)` shows the choice in words. `claim` says whether no plan is faster, how large the gap may be, and which plans
    were left out.
    """

    largest_file_bytes = LARGEST_RECORD_BYTES

    format: Literal[1] = 1
    plan: Plan
    estimate: Estimate
    runners_up: tuple[RunnerUp, ...]
    """Best first; those that do not fit come last."""
    num_candidates: CountOrZero
    search_seconds: NotNegative
    method: str = "joint"
    num_costed: CountOrZero = 0
    """Of the candidates, those that no bound left out."""
    claim: Claim = Claim()
    """What is proven about the plan."""
    remark: str = ""
    """Why it is not the fastest plan that was found, where it is not."""

    @property
    def gap(self) -> float | None:
        return self.claim.gap

    @property
    def complete(self) -> bool:
        return self.claim.complete

    def __str__(self) -> str:
        estimate = self.estimate
        promise = "; the runners-up:" if self.runners_up else ""
        lines = [
            f"{describe(self.plan)}: {format_seconds(estimate.step_seconds)} per step, "
            f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.budget_bytes)} per device, "
            f"{estimate.tokens_per_second:,.0f} tokens/s",
            f"{self.num_candidates} candidates in {format_seconds(self.search_seconds)}{promise}",
            *(f"  {describe(other.plan)}: {other.reason}" for other in self.runners_up[:5]),
        ]
        return "\n".join(lines)


def describe(plan: Plan) -> str:
    """A plan in a few words: `dp 8 · ZeRO 2 · 4 microbatches of 2 · recompute full · bf16`."""
    axes = [f"{axis} {degree}" for axis in ("pp", "dp", "cp", "tp", "ep") if (degree := getattr(plan.mesh, axis)) > 1]
    parts = axes or ["one device"]
    if plan.zero:
        parts.append(f"ZeRO {plan.zero}" + (f" in groups of {plan.hybrid}" if plan.hybrid else ""))
    elif plan.mesh.dp > 1:
        parts.append("replicated")
    noun = "microbatch" if plan.num_microbatches == 1 else "microbatches"
    parts.append(f"{plan.num_microbatches} {noun} of {plan.microbatch}")
    if plan.recompute:
        parts.append(f"recompute {' + '.join(dict.fromkeys(rule.mode for rule in plan.recompute))}")
    if plan.offload.what != "none":
        parts.append(offload_in_short(plan))
    if plan.compile:
        parts.append("compiled")
    return " · ".join([*parts, plan.precision])


def offload_in_short(plan: Plan) -> str:
    """What leaves the device: `offload 46% of optimizer`; where nothing does, how its parameters are kept."""
    offload = plan.offload
    if offload.what == "none":
        return "no offload"
    if offload.what == "optimizer" and offload.share == 0:
        return f"parameters in {plan.precision}, masters beside" if plan.stores_16_bits else "offload nothing"
    share = "" if offload.share == 1 else f"{offload.share:.0%} of "
    return f"offload {share}{offload.what}"
