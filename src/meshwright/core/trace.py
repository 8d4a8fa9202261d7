"""A Trace: what a run did. The same fields as an Estimate, observed."""

from __future__ import annotations

from typing import Literal

from meshwright.core.codec import Value
from meshwright.core.collective import Collective
from meshwright.core.estimate import MemoryParts, TimeParts


class StepRecord(Value, kw_only=True):
    """One step as one rank saw it."""

    step: int
    loss: float
    seconds: float
    time_seconds: TimeParts
    tokens: int
    sampled: bool = False
    """Sampled steps run under the recorder and are left out of the timings."""


class Trace(Value, kw_only=True):
    format: Literal[1] = 1
    plan: str
    """Hash of the plan that ran."""
    rank: int
    num_ranks: int
    step_seconds: float
    """Median over the steps that count."""
    time_seconds: TimeParts
    peak_bytes: int | None = None
    """Of the worst rank, at the allocator; None when no step was sampled."""
    memory_bytes: MemoryParts | None = None
    host_bytes: int
    """Peak resident memory of the process."""
    tokens_per_second: float
    collectives: tuple[Collective, ...] = ()
    num_steps: int
    steps: tuple[StepRecord, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Versions and device names, for reproduction."""
