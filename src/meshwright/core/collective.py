"""A collective call, predicted or observed. The bytes are the input tensor's bytes at the c10d call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from meshwright.core.axes import Axis
from meshwright.core.bounds import CountOrZero
from meshwright.core.codec import Value

CollectiveKind = Literal[
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all", "send"
]

COUNT_BYTES = 8
"""Before the first backward of a step the ranks add up how many tokens the global batch holds (one float64)."""
LOSS_BYTES = 32
"""After the last backward they add up the loss, the stop signal, and dropped and all choices of experts (four float64)."""
NORM_BYTES = 8
"""Clipping sharded gradients adds up one squared norm (one float64)."""
FLAG_BYTES = 4
"""In fp16 the ranks tell each other whether their gradients are finite (one float32)."""


class Collective(Value, kw_only=True):
    """All calls of one kind along one axis in a step, on one rank."""

    kind: CollectiveKind
    axis: Axis
    count: CountOrZero
    total_bytes: CountOrZero


def total(calls: Iterable[Collective]) -> tuple[Collective, ...]:
    """One row per kind and axis, in a fixed order, without empty rows."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for call in calls:
        count, num_bytes = sums.get((call.kind, call.axis), (0, 0))
        sums[call.kind, call.axis] = (count + call.count, num_bytes + call.total_bytes)
    rows = (
        Collective(kind=kind, axis=axis, count=count, total_bytes=num_bytes)  # type: ignore[arg-type]
        for (kind, axis), (count, num_bytes) in sorted(sums.items())
    )
    return tuple(row for row in rows if row.count)
