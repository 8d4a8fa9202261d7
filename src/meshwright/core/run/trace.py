"""A Trace: what a run did; the same fields as an Estimate, observed.

A Forecast: one predicted step, moment by moment. An Estimate says how much, a Forecast says when.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from meshwright.core.axes import Axis
from meshwright.core.bounds import LARGEST_RECORD_BYTES, CountOrZero, Degree, NotNegative, Number, Samples
from meshwright.core.codec import Value
from meshwright.core.collective import Collective, CollectiveKind
from meshwright.core.estimate import MemoryParts, TimeParts
from meshwright.core.pipeline.schedule import ActionKind

Stream = Literal["compute", "communication", "transfer"]
Part = Literal[
    "forward", "recompute", "backward", "update", "waiting", "other", "host_to_device", "device_to_host", CollectiveKind
]

WARMUP_STEPS = 3
"""Steps left out of the timings where there are more."""


class StepRecord(Value, kw_only=True):
    """One step as one rank saw it."""

    step: CountOrZero
    loss: float
    seconds: Number
    time_seconds: TimeParts
    tokens: CountOrZero
    sampled: bool = False
    """Sampled steps run under the recorder and are left out of the timings."""


def steps_that_count(records: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
    """The steps that are timed: without warm-up and sampled steps, where enough others remain."""
    plain = tuple(record for record in records if not record.sampled)
    return plain[WARMUP_STEPS:] if len(plain) > 2 * WARMUP_STEPS else plain[1:] or plain


class Interval(Value, kw_only=True):
    """A stretch of the sampled step on one stream. Intervals of one stream and axis do not overlap.

    compute: what the device computes for, or `waiting` (it stands still while a collective runs), or `other` (the host
        between two actions). Gaps are idle.
    communication: one collective, along `axis`. A collective begins when this rank is ready, so that it contains the wait
        for the other ranks.
    transfer: a copy between host and device.
    """

    stream: Stream
    part: Part
    start_seconds: Number
    """Seconds since the step began."""
    seconds: Number
    axis: Axis | None = None
    num_bytes: CountOrZero | None = None
    """Bytes of a collective's input tensor, or of a copy."""


class PartSeconds(Value, kw_only=True):
    """All intervals of one part on one stream, before short gaps between them are closed for the timeline."""

    stream: Stream
    part: Part
    axis: Axis | None = None
    seconds: Number
    count: CountOrZero


class MemoryPoint(Value, kw_only=True):
    """Bytes in use from one moment of the sampled step to the next point."""

    at_seconds: Number
    """Seconds since the step began."""
    memory_bytes: MemoryParts


class Trace(Value, kw_only=True):
    """What a run did, as one rank saw it: an Estimate's fields, observed.

        trace = program.trace()                    # or mw.Trace.load("runs/mine/trace.json")
        print(mw.predicted_vs_measured(estimate, trace))

    step_seconds, time_seconds    median of the steps that count, and its parts
    peak_bytes, memory_bytes      at the allocator, of the worst rank, and by category; None when no step was sampled
    tokens_per_second, host_bytes, num_steps, steps
                                  throughput, peak memory of the process, and every step's loss and seconds
    timeline, part_seconds, memory_over_time, collectives
                                  the last sampled step, moment by moment
    """

    largest_file_bytes = LARGEST_RECORD_BYTES

    format: Literal[1] = 1
    plan: str
    """Hash of the plan that ran."""
    rank: CountOrZero
    num_ranks: Degree
    step_seconds: Number
    """Median over the steps that count."""
    time_seconds: TimeParts
    peak_bytes: CountOrZero | None = None
    """Peak of the worst rank's allocator; None when no step was sampled."""
    memory_bytes: MemoryParts | None = None
    host_bytes: CountOrZero
    """Peak resident memory of the process."""
    tokens_per_second: Number
    collectives: tuple[Collective, ...] = ()
    timeline: tuple[Interval, ...] = ()
    """Intervals of the last sampled step; `collectives`, `part_seconds` and `sampled_at` are of the same step."""
    part_seconds: tuple[PartSeconds, ...] = ()
    sampled_at: Number | None = None
    """When that step began on this rank, in seconds of the host's clock since 1970, so that all ranks are on one clock."""
    memory_over_time: tuple[MemoryPoint, ...] = ()
    """As many moments as a picture can show (rules/downsampling.py); the peak is one of them."""
    num_steps: CountOrZero
    steps: tuple[StepRecord, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Versions and device names, for reproduction."""


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """When one unit of stage work is to run: `["forward", stage, microbatch, start, end]`, in seconds since the step began."""

    kind: ActionKind
    stage: CountOrZero
    microbatch: CountOrZero
    start_seconds: Number
    end_seconds: Number


class Forecast(Value, kw_only=True):
    """One predicted step, moment by moment: the work of every coordinate and its memory over time."""

    largest_file_bytes = LARGEST_RECORD_BYTES

    format: Literal[1] = 1
    step_seconds: NotNegative
    num_microbatches: Samples
    """Number of microbatches shown: fewer than the plan's where the rest of a long step repeats."""
    work: tuple[tuple[Planned, ...], ...]
    """One row a pp coordinate."""
    memory_over_time: tuple[tuple[MemoryPoint, ...], ...]
    """One curve a pp coordinate: the fullest moment of every pass, from its beginning to the next."""
