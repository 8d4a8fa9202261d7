"""Seconds of one kernel on a probed device: points measured at a few sizes, a power law between them.

kernel:  work / rate(kind, dtype, size); work is flops for matmul, convolution and attention, bytes read and written
         for the rest. Above the largest size the rate stays; below the smallest the time stays (CPU) or the rate does
         (CUDA, where launches are counted apart)                                              -> kernel_seconds
"""

from __future__ import annotations

from meshwright.core.cluster import Device
from meshwright.core.errors import InputError
from meshwright.core.graph import OpKind, Precision
from meshwright.cost.interpolation import Measurements


def measured_kernels(device: Device, precision: Precision) -> dict[OpKind, Measurements]:
    """Points by kind. A CPU runs fp64 at half its fp32 rate where that was not measured."""
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
    known = ", ".join(sorted({rate.dtype for rate in device.rates} | set(device.peaks)))
    return InputError(
        f"device '{device.name}' has no {precision} rate for {kind} (it has {known}): "
        "use another precision, or a cluster file that has it, such as one saved by `meshwright probe --fresh -o FILE`"
    )
