"""Measurements of a probed device, interpolated between sizes: kernels and collectives.

between two sizes          a power law: log seconds is linear in log size
above the largest size     the rate of the largest size
below the smallest size    the seconds of the smallest size (CPU), or its rate (CUDA, where launches are counted apart)

The size of a kernel is flops for matmul, convolution and attention, and bytes read and written for every other kind.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

from meshwright.core.cluster import Device
from meshwright.core.errors import InputError
from meshwright.core.graph import OpKind, Precision
from meshwright.rules.kinds import cached_in_value

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


class MeasuredKernels:
    """Seconds of kernels on one probed device. What is asked of it is asked of analytical `Kernels` too."""

    def __init__(self, device: Device) -> None:
        self.device = device

    @cached_in_value
    def measurements(self, dtype: Precision) -> dict[OpKind, Measurements]:
        return measured_kernels(self.device, dtype)

    def seconds(self, kind: OpKind, dtype: Precision, work: float) -> float:
        """work: flops, or bytes."""
        return interpolated_seconds(work, self.measurements(dtype)[kind], has_least=self.device.kind == "cpu")

    def copy_seconds(self, num_bytes: float, dtype: Precision) -> float:
        return self.seconds("copy", dtype, num_bytes)

    def fused_seconds(self, num_bytes: float, dtype: Precision) -> float:
        return self.seconds("elementwise", dtype, num_bytes)

    def update_seconds(self, num_bytes: float) -> float:
        precision: Precision = "fp32" if any(rate.dtype == "fp32" for rate in self.device.rates) else "bf16"
        return interpolated_seconds(num_bytes, self.measurements(precision)["elementwise"])


def measured_kernels(device: Device, precision: Precision) -> dict[OpKind, Measurements]:
    """Kind of op → its measurements. A CPU without fp64 measurements runs fp64 at half its fp32 rate."""
    found: dict[OpKind, Measurements] = {}
    for rate in device.rates:
        if rate.dtype == precision:
            found.setdefault(rate.kind, []).append((rate.size, rate.size / rate.per_second))
    if not found and precision == "fp64" and device.kind == "cpu":
        return {
            kind: [(s, 2 * t) for s, t in measurements]
            for kind, measurements in measured_kernels(device, "fp32").items()
        }
    if not found:
        raise no_rate(device, precision, "any op")
    return {kind: sorted(measurements) for kind, measurements in found.items()}


def no_rate(device: Device, precision: str, kind: str) -> InputError:
    """The error for a kind of op or a precision that the device was not measured with."""
    known = ", ".join(sorted({rate.dtype for rate in device.rates} | set(device.peaks)))
    return InputError(
        f"device '{device.name}' has no {precision} rate for {kind} (it has {known}): "
        "use another precision, or a cluster file that has it, such as one saved by `meshwright probe --fresh -o FILE`"
    )
