"""The slow rank, if there is one: the others wait for it.

Ranks on one pp coordinate have the same work. In the sampled step a rank is busy for b seconds (its compute stream, without
waiting and idle time); the median of the ranks beside it is m. A rank is slow where

    b - m > LEAST_SHARE · step       its excess is a real part of the step
    b - m > 2 · spread               and stands out from how the others differ; spread: the median of |b' - m| over them

Its share of waiting is (b - m) / step: what the step would be shorter were it like the others.      -> find_straggler
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.core.plan import Plan
from meshwright.core.run.trace import Trace
from meshwright.core.units import format_seconds

LEAST_SHARE = 0.05
IDLE = ("waiting", "other")


@dataclass(frozen=True)
class Straggler:
    rank: int
    busy_seconds: float
    usual_seconds: float
    """Of the ranks with the same work."""
    waiting_share: float
    """Of the step, that the others wait for it."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: busy for {format_seconds(self.busy_seconds)} of the sampled step where ranks with the same "
            f"work need {format_seconds(self.usual_seconds)}; the others wait for it {self.waiting_share:.0%} of the step"
        )


def busy_seconds(trace: Trace) -> float:
    """Of the sampled step, what the compute stream worked."""
    return sum(part.seconds for part in trace.part_seconds if part.stream == "compute" and part.part not in IDLE)


def find_straggler(plan: Plan, traces: Sequence[Trace]) -> Straggler | None:
    """The slowest rank, where it is far slower than ranks with the same work."""
    found = [one for group in _alike(plan, traces) if (one := _slowest(group)) is not None]
    return max(found, key=lambda straggler: straggler.waiting_share, default=None)


def _alike(plan: Plan, traces: Iterable[Trace]) -> Iterable[list[Trace]]:
    """Ranks of one pp coordinate that were sampled."""
    groups: dict[int, list[Trace]] = {}
    for trace in traces:
        if trace.part_seconds:
            groups.setdefault(trace.rank * plan.mesh.pp // plan.world, []).append(trace)
    return groups.values()


def _slowest(group: Sequence[Trace]) -> Straggler | None:
    if len(group) < 2:
        return None
    slowest = max(group, key=busy_seconds)
    others = [busy_seconds(trace) for trace in group if trace is not slowest]
    busy, usual = busy_seconds(slowest), statistics.median(others)
    spread = statistics.median(abs(one - usual) for one in others)
    step = sampled_seconds(slowest)
    if busy - usual <= max(LEAST_SHARE * step, 2 * spread):
        return None
    return Straggler(slowest.rank, busy, usual, (busy - usual) / step)


def sampled_seconds(trace: Trace) -> float:
    """From the beginning of the sampled step to the end of its last interval."""
    return max((one.start_seconds + one.seconds for one in trace.timeline), default=trace.step_seconds)
