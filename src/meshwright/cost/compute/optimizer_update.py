"""Seconds of the optimizer's update on the device, of gradient clipping, and of adding up gradients over microbatches."""

from __future__ import annotations

from meshwright.core.cluster import Device
from meshwright.core.graph import Precision
from meshwright.cost.compute.analytical_kernels import Kernels
from meshwright.cost.compute.measured_kernels import measured_kernels
from meshwright.cost.interpolation import interpolated_seconds

ADAM_SLOTS = 2


def update_bytes(slots: int, item_bytes: int = 4) -> int:
    """Bytes moved per element: the optimizer reads a parameter, its gradient and its slots, and writes all but the gradient."""
    return item_bytes * (3 + 2 * slots)


def update_seconds(num_elements: float, device: Device, slots: int = ADAM_SLOTS, item_bytes: int = 4) -> float:
    """The optimizer's pass over this rank's elements. The probe measures AdamW in fp32; other optimizers move fewer bytes."""
    num_bytes = num_elements * update_bytes(slots, item_bytes)
    if device.update_elements_per_second is not None:
        return num_bytes / update_bytes(ADAM_SLOTS) / device.update_elements_per_second
    if device.constants is not None:
        return Kernels(device, device.constants).update_seconds(num_bytes)
    return interpolated_seconds(num_bytes, _elementwise_measurements(device))


def clip_seconds(num_elements: float, num_tensors: int, device: Device) -> float:
    """The norm reads every gradient, the scaling reads and writes it, two ops a tensor."""
    num_bytes = 3 * 4 * num_elements
    if device.constants is not None:
        moved = Kernels(device, device.constants).update_seconds(num_bytes)
    else:
        moved = interpolated_seconds(num_bytes, _elementwise_measurements(device))
    launches = 2 * num_tensors * device.launch_seconds
    return moved + launches if device.kind == "cpu" else max(moved, launches)


def accumulation_seconds(num_elements: float, num_microbatches: int, device: Device) -> float:
    """Gradients of every microbatch but the first are added to the earlier sum: two reads and a write.

    Counted on probed devices only: the fitted constants of named devices include it.
    """
    if device.constants is not None:
        return 0.0
    return (num_microbatches - 1) * interpolated_seconds(3 * 4 * num_elements, _elementwise_measurements(device))


def _elementwise_measurements(device: Device) -> list[tuple[float, float]]:
    precision: Precision = "fp32" if any(rate.dtype == "fp32" for rate in device.rates) else "bf16"
    return measured_kernels(device, precision)["elementwise"]
