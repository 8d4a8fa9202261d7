"""Seconds of the optimizer's update on the device, of gradient clipping, and of adding up gradients over microbatches."""

from __future__ import annotations

from meshwright.core.cluster import Device
from meshwright.cost.compute.kernel_costs import kernels_of

ADAM_SLOTS = 2


def update_bytes(slots: int, item_bytes: int = 4) -> int:
    """Bytes moved per element: the optimizer reads a parameter, its gradient and its slots, and writes all but the gradient."""
    return item_bytes * (3 + 2 * slots)


def update_seconds(num_elements: float, device: Device, slots: int = ADAM_SLOTS, item_bytes: int = 4) -> float:
    """The optimizer's pass over this rank's elements. The probe measures AdamW in fp32; other optimizers move fewer bytes."""
    num_bytes = num_elements * update_bytes(slots, item_bytes)
    if device.update_elements_per_second is not None:
        return num_bytes / update_bytes(ADAM_SLOTS) / device.update_elements_per_second
    return kernels_of(device).update_seconds(num_bytes)


def clip_seconds(num_elements: float, num_tensors: int, device: Device) -> float:
    """The norm reads every gradient, the scaling reads and writes it, two ops a tensor."""
    moved = kernels_of(device).update_seconds(3 * 4 * num_elements)
    launches = 2 * num_tensors * device.launch_seconds
    return moved + launches if device.kind == "cpu" else max(moved, launches)


def accumulation_seconds(num_elements: float, num_microbatches: int, device: Device) -> float:
    """Gradients of every microbatch but the first are added to the earlier sum: two reads and a write.

    Counted on probed devices only: the fitted constants of named devices include it.
    """
    if device.constants is not None:
        return 0.0
    return (num_microbatches - 1) * kernels_of(device).update_seconds(3 * 4 * num_elements)
