"""A Forecast: one predicted step, moment by moment. An Estimate says how much, a Forecast says when."""

from __future__ import annotations

from typing import Literal

import msgspec

from meshwright.core.bounds import LARGEST_RECORD_BYTES, CountOrZero, NotNegative, Number, Samples
from meshwright.core.codec import Value
from meshwright.core.pipeline.schedule import ActionKind
from meshwright.core.run.trace import MemoryPoint


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
    """How many are shown: fewer than the plan's where the rest of a long step goes on alike."""
    work: tuple[tuple[Planned, ...], ...]
    """One row a pp coordinate."""
    memory_over_time: tuple[tuple[MemoryPoint, ...], ...]
    """One curve a pp coordinate: the fullest moment of every pass, from its beginning to the next."""
