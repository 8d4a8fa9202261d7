"""A SearchResult: the plan, what it is predicted to cost, why every other candidate lost, and what is proven (its Claim).

While a search works, it tells how far it has come: SearchProgress. Where nothing fits, it says what a person can do about it:
Infeasible.
"""

from __future__ import annotations

from typing import Literal

from meshwright.core.bounds import LARGEST_RECORD_BYTES, CountOrZero, NotNegative
from meshwright.core.codec import Value
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.units import format_bytes, format_seconds


class Claim(Value, kw_only=True):
    """The lower bounds that a search has proven about its plan, and the plans they cover.

    It holds by the estimates alone: how far these are off is another question.
    """

    complete: bool = False
    """Whether every plan that the flags can ask for was costed, or ruled out by a lower bound."""
    gap: NotNegative | None = None
    """No plan that was searched is faster than the one returned by more than this share; None: nothing is proven."""
    left_out: tuple[str, ...] = ()
    """Plans that were not searched, in words. The gap does not cover them."""

    @property
    def words(self) -> str:
        """The claim as one clause: `no plan that was searched is faster by these estimates; not searched: gpipe`."""
        if self.gap is None:
            proven = "a faster plan may exist"
        else:
            which = "plan that was searched" if self.left_out else "plan"
            more = f"more than {self.gap:.1%} " if self.gap else ""
            proven = f"no {which} is {more}faster by these estimates"
        return "; ".join([proven, *([f"not searched: {', '.join(self.left_out)}"] if self.left_out else [])])


class RunnerUp(Value, kw_only=True):
    """A plan that was considered and lost, with the reason."""

    plan: Plan
    step_seconds: NotNegative
    peak_bytes: CountOrZero
    reason: str
    fits: bool = True


class SearchResult(Value, kw_only=True):
    """The answer of a search: the plan, its estimate, why every other candidate lost, and what was proven about it.

        result = mw.plan(model, cluster)
        print(result)                               # the choice in words, and the runners-up
        result.plan.save("plan.json")

    plan, estimate              the choice, and what it is predicted to cost
    runners_up                  plans that lost, best first, each with the reason
    claim                       whether no plan is faster, how large the gap may be, and which plans were left out; gap, complete
    num_candidates, num_costed, search_seconds, method, remark
                                how it was found, and why it is not the fastest that was found, where it is not
    """

    largest_file_bytes = LARGEST_RECORD_BYTES

    format: Literal[1] = 1
    plan: Plan
    estimate: Estimate
    runners_up: tuple[RunnerUp, ...]
    """The best first; plans that do not fit come last."""
    num_candidates: CountOrZero
    search_seconds: NotNegative
    method: str = "joint"
    num_costed: CountOrZero = 0
    """Number of candidates that were costed; lower bounds ruled out the others."""
    claim: Claim = Claim()
    """Lower bounds that hold for the plan."""
    remark: str = ""
    """Why it is not the fastest plan that was found, where it is not."""

    @property
    def gap(self) -> float | None:
        """No plan that was searched is faster by more than this share; None: nothing is proven."""
        return self.claim.gap

    @property
    def complete(self) -> bool:
        """Whether all plans that were asked for were searched."""
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


class SearchProgress(Value, kw_only=True):
    """The current stage of a search, and the best plan so far."""

    stage: str
    num_costed: int
    """Plans that were costed."""
    best_seconds: float | None = None
    """Step time of the fastest plan that fits, so far."""
    bound_seconds: float | None = None
    """Lower bound on the step of every plan that is not ruled out."""

    @property
    def gap(self) -> float | None:
        """How much slower the best plan may be than the fastest there is."""
        if self.best_seconds is None or not self.bound_seconds:
            return None
        return max(0.0, self.best_seconds / self.bound_seconds - 1)

    @property
    def words(self) -> str:
        """In a line of a narrow terminal."""
        words = f"searching {self.stage}: {self.num_costed} costed"
        if self.best_seconds is None:
            return f"{words}, none fits so far"
        gap = "" if self.gap is None else f", gap at most {self.gap:.0%}"
        return f"{words}, best {format_seconds(self.best_seconds)} a step{gap}"


def describe(plan: Plan) -> str:
    """A plan in a few words: `dp 8 · ZeRO 2 · 4 microbatches of 2 · recompute full · bf16`."""
    parts = [f"{axis} {degree}" for axis, degree in plan.mesh.used.items()] or ["one device"]
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
    """The offload in words: `offload 46% of optimizer`; without offload, how parameters are stored."""
    offload = plan.offload
    if offload.what == "none":
        return "no offload"
    if offload.what == "optimizer" and offload.share == 0:
        return f"parameters in {plan.precision}, fp32 master weights" if plan.stores_16_bits else "offload nothing"
    share = "" if offload.share == 1 else f"{offload.share:.0%} of "
    return f"offload {share}{offload.what}"


class WayOut(Value, kw_only=True):
    """One change of the nearest miss, costed."""

    words: str
    """`selective recompute of blocks.0-23`."""
    plan: Plan
    estimate: Estimate
    num_hosts: int
    """Hosts of the cluster that it needs."""
    saved_bytes: int
    """Per device, against the nearest miss."""
    slower_share: float
    """Share by which its step is longer; negative where it is faster."""
    leave_out: tuple[str, ...] = ()
    """Flags that fixed what it changes."""
    not_yet: tuple[str, ...] = ()
    """Parts of the plan that can be costed, but not run yet."""


class Infeasible(Value, kw_only=True):
    """Nothing fits: the plan that misses by least, which limit it breaks, and the cheapest changes that would make it fit."""

    plan: Plan
    """The nearest miss."""
    estimate: Estimate
    binding: str
    """The limit that the nearest miss breaks, where, and by how much."""
    num_candidates: int
    ways_out: tuple[WayOut, ...] = ()
    """The cheapest first. Where none fits, the one that comes nearest."""
