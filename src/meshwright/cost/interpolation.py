"""Interpolation of measured seconds between sizes, for kernels and collectives.

between two sizes          a power law: log seconds is linear in log size
above the largest size     the rate of the largest size
below the smallest size    the seconds of the smallest size (CPU), or its rate (CUDA, where launches are counted apart)
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

Measurements = list[tuple[float, float]]
"""(size, seconds), sizes ascending."""


def interpolated_seconds(work: float, measurements: Measurements, *, has_least: bool = True) -> float:
    """has_least: whether work below the smallest measured size takes that size's seconds; otherwise it runs at that size's rate."""
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
