"""Kernels of a probed device: the seconds of each kind of op, measured at a few sizes (interpolated by cost/interpolation.py).

The size is flops for matmul, convolution and attention, and bytes read and written for every other kind.
"""

from __future__ import annotations

from meshwright.core.cluster import Device
from meshwright.core.errors import InputError
from meshwright.core.graph import OpKind, Precision
from meshwright.cost.interpolation import Measurements, interpolated_seconds


class MeasuredKernels:
    """Seconds of kernels on one probed device. What is asked of it is asked of analytical `Kernels` too."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: dict[Precision, dict[OpKind, Measurements]] = {}

    def measurements(self, dtype: Precision) -> dict[OpKind, Measurements]:
        if dtype not in self._known:
            self._known[dtype] = measured_kernels(self.device, dtype)
        return self._known[dtype]

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
