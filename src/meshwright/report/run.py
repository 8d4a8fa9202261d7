"""A Run: all that is known about one run, or of a run that is only planned; what the pages and words about it are made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.result import SearchResult
from meshwright.core.run.trace import Forecast, Trace, steps_that_count


@dataclass(frozen=True)
class Run:
    name: str
    plan: Plan
    estimate: Estimate
    cluster: Cluster | None = None
    forecast: Forecast | None = None
    result: SearchResult | None = None
    """How the plan was found, where it was searched."""
    traces: tuple[Trace, ...] = ()
    """Of all ranks that are known, in their order; none where nothing ran yet. Of a run that goes on: without steps."""
    metrics: tuple[Mapping[str, Any], ...] = ()
    settings: str = ""
    """The file that makes the run again."""
    remark: str = ""
    """What is missing, and why."""
    repeats: tuple[tuple[float, ...], ...] = ()
    """Seconds of the steps of the same run done again."""

    @property
    def unit(self) -> str:
        """What its speed counts: a sample that is one token, such as an image, is called a sample."""
        per_sample = self.estimate.tokens_per_second * self.estimate.step_seconds / self.plan.global_batch
        return "samples" if round(per_sample) == 1 else "tokens"

    @property
    def goes_on(self) -> bool:
        """Whether it has begun, and has left no trace of its steps yet."""
        return bool(self.step_seconds) and not any(trace.steps for trace in self.traces)

    @property
    def worst(self) -> Trace | None:
        """Of the rank with the highest peak."""
        return max(self.traces, key=lambda trace: (trace.peak_bytes or 0, -trace.rank), default=None)

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Of every step that counts, repeats included."""
        return (*self.own_seconds, *(seconds for repeat in self.repeats for seconds in repeat))

    @property
    def own_seconds(self) -> tuple[float, ...]:
        """Without repeats."""
        trace = self.worst
        if trace is None or not trace.steps:
            seconds = [line["seconds"] for line in self.metrics if "seconds" in line]
            return tuple(seconds[1:] or seconds)
        return tuple(record.seconds for record in steps_that_count(trace.steps))

    @property
    def loss(self) -> float | None:
        """The last one that is known."""
        found = [line["loss"] for line in self.metrics if "loss" in line]
        return found[-1] if found else None


def speed_words(per_second: float) -> str:
    """Whole numbers, unless there are few."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def percentile(values: tuple[float, ...], share: float) -> float:
    """The value that `share` of the values do not exceed, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median(values: tuple[float, ...]) -> float | None:
    return statistics.median(values) if values else None
