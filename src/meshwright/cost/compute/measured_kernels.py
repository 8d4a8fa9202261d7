"""Seconds of one kernel on a probed device: points measured at a few sizes, a power law between them.

kernel:  work / rate(kind, dtype, size); work is flops for matmul, convolution and attention, bytes read and written
         for the rest. Above the largest size the rate stays; below the smallest the time stays (CPU) or the rate does
         (CUDA, where launches are counted apart)                                              -> kernel_seconds
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

from meshwright.core.cluster import Device
from meshwright.core.errors import InputError
from meshwright.core.graph import OpKind, Precision

Points = list[tuple[float, float]]
"""(size, seconds), sizes ascending."""


def rate_points(device: Device, precision: Precision) -> dict[OpKind, Points]:
    """Points by kind. A CPU runs fp64 at half its fp32 rate where that was not measured."""
    found: dict[OpKind, Points] = {}
    for rate in device.rates:
        if rate.dtype == precision:
            found.setdefault(rate.kind, []).append((rate.size, rate.size / rate.per_second))
    if not found and precision == "fp64" and device.kind == "cpu":
        return {kind: [(s, 2 * t) for s, t in points] for kind, points in rate_points(device, "fp32").items()}
    if not found:
        raise no_rate(device, precision, "any op")
    return {kind: sorted(points) for kind, points in found.items()}


def no_rate(device: Device, precision: str, kind: str) -> InputError:
    known = ", ".join(sorted({rate.dtype for rate in device.rates} | set(device.peaks)))
    return InputError(
        f"device '{device.name}' has no {precision} rate for {kind} (it has {known}): "
        "use another precision, or a cluster file that has it, such as one saved by `meshwright probe --fresh -o FILE`"
    )


def kernel_seconds(work: float, points: Points, *, has_least: bool = True) -> float:
    """Interpolate between measured sizes.

    has_least: whether the smallest measured time is the least there is; else the rate goes on below it.
    """
    if work <= 0:
        return 0.0
    first_size, first_seconds = points[0]
    last_size, last_seconds = points[-1]
    if work >= last_size:
        return last_seconds * work / last_size
    if work <= first_size:
        return first_seconds if has_least and len(points) > 1 else first_seconds * work / first_size
    for (size, seconds), (next_size, next_seconds) in pairwise(points):
        if work <= next_size:
            share = log(work / size) / log(next_size / size)
            return exp(log(seconds) + share * log(next_seconds / seconds))
    raise AssertionError("sizes are ascending")
