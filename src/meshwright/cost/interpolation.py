"""Seconds measured at a few sizes, interpolated: a power law between two sizes, the rate of the largest above it."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

Measurements = list[tuple[float, float]]
"""(size, seconds), sizes ascending."""


def interpolated_seconds(work: float, measurements: Measurements, *, has_least: bool = True) -> float:
    """Interpolate between measured sizes.

    has_least: whether the smallest measured time is the least there is; else the rate goes on below it.
    """
    if work <= 0:
        return 0.0
    first_size, first_seconds = measurements[0]
    last_size, last_seconds = measurements[-1]
    if work >= last_size:
        return last_seconds * work / last_size
    if work <= first_size:
        return first_seconds if has_least and len(measurements) > 1 else first_seconds * work / first_size
    for (size, seconds), (next_size, next_seconds) in pairwise(measurements):
        if work <= next_size:
            share = log(work / size) / log(next_size / size)
            return exp(log(seconds) + share * log(next_seconds / seconds))
    raise AssertionError("sizes are ascending")
