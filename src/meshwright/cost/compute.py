"""Seconds of compute.

kernel:  work / rate(kind, dtype, size); work is flops for matmul, convolution and attention, bytes read and written
         for the rest                                                                          -> kernel_seconds
rate:    seconds measured at a few sizes, a power law between them; above the largest the rate stays, below the
         smallest the time stays (CPU) or the rate does (CUDA, where launches are counted apart)
phase:   Σ (launch + kernel)       where the host runs each op itself (CPU)
         max(Σ launch, Σ kernel)   where the host runs ahead and ops queue on the device (CUDA)  -> phase_seconds
update:  elements held by this rank / measured rate, or 7 · 4 bytes each through memory        -> update_seconds
clip:    three passes over the gradients, two ops a tensor                                     -> clip_seconds
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import exp, log
from typing import get_args

from meshwright.core.cluster import FLOP_KINDS, Cluster, Device
from meshwright.core.errors import InputError
from meshwright.core.graph import Block, Graph, Kind, Op, OpKind, Phase, Precision

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
UPDATE_BYTES_PER_ELEMENT = 28
"""AdamW reads parameter, gradient and two moments, and writes three of them back, in fp32."""


class ComputeCost:
    """Seconds of whole phases for one microbatch size; each kind of block is looked up once."""

    def __init__(self, graph: Graph, cluster: Cluster, microbatch: int) -> None:
        self.device = cluster.device
        self.microbatch = microbatch
        needed = {(op.dtype, op.kind) for kind in graph.kinds for op in kind.ops}
        self._points = {dtype: rate_points(cluster.device, dtype) for dtype, _ in needed}
        for dtype, op_kind in sorted(needed):
            if op_kind not in self._points[dtype]:
                raise _no_rate(cluster.device, dtype, op_kind)
        self._sums = {
            (kind.name, phase): self._add_up(kind, phase) for kind in graph.kinds for phase in get_args(Phase)
        }

    def phase_seconds(self, blocks: Iterable[Block], phase: Phase) -> float:
        """One microbatch through these blocks, forward or backward."""
        sums = [self._sums[block.kind, phase] for block in blocks]
        launches, kernels = (sum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0)
        return launches + kernels if self.device.kind == "cpu" else max(launches, kernels)

    def _add_up(self, kind: Kind, phase: Phase) -> tuple[float, float]:
        """Launches and kernels of one block."""
        ops = [op for op in kind.ops if op.phase == phase]
        launch = self.device.launch_seconds
        if phase == "backward" and self.device.backward_launch_seconds is not None:
            launch = self.device.backward_launch_seconds
        return (
            sum(op.count for op in ops) * launch,
            sum(op.count * self.op_seconds(op) for op in ops),
        )

    def op_seconds(self, op: Op) -> float:
        """One kernel, once it runs."""
        points = self._points[op.dtype]
        num_bytes = op.read_bytes.at(self.microbatch) + op.written_bytes.at(self.microbatch)
        work = op.flops.at(self.microbatch) if op.kind in FLOP_KINDS else num_bytes
        kernel = kernel_seconds(work, points[op.kind], has_least=self.device.kind == "cpu")
        if op.kind in FLOP_KINDS and len(points[op.kind]) == 1:  # a vendor's figure knows no small sizes
            return max(kernel, kernel_seconds(num_bytes, points["copy"]))
        return kernel


def rate_points(device: Device, precision: Precision) -> dict[OpKind, list[tuple[float, float]]]:
    """(size, seconds) by kind, sizes ascending. A CPU runs fp64 at half its fp32 rate where that was not measured."""
    found: dict[OpKind, list[tuple[float, float]]] = {}
    for rate in device.rates:
        if rate.dtype == precision:
            found.setdefault(rate.kind, []).append((rate.size, rate.size / rate.per_second))
    if not found and precision == "fp64" and device.kind == "cpu":
        return {kind: [(s, 2 * t) for s, t in points] for kind, points in rate_points(device, "fp32").items()}
    if not found:
        raise _no_rate(device, precision, "any op")
    return {kind: sorted(points) for kind, points in found.items()}


def _no_rate(device: Device, precision: str, kind: str) -> InputError:
    known = ", ".join(sorted({rate.dtype for rate in device.rates}))
    return InputError(
        f"device '{device.name}' has no {precision} rate for {kind} (it has {known}): "
        "use another precision, or a cluster file that has it, such as one saved by `meshwright probe --fresh -o FILE`"
    )


def kernel_seconds(work: float, points: list[tuple[float, float]], *, has_least: bool = True) -> float:
    """Interpolate between measured sizes; a power law between two points.

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


def update_seconds(num_elements: int, device: Device) -> float:
    """The optimizer's pass over the elements this rank holds."""
    if device.update_elements_per_second is not None:
        return num_elements / device.update_elements_per_second
    points = rate_points(device, "fp32" if any(rate.dtype == "fp32" for rate in device.rates) else "bf16")
    return kernel_seconds(num_elements * UPDATE_BYTES_PER_ELEMENT, points["elementwise"])


def clip_seconds(num_elements: int, num_tensors: int, device: Device) -> float:
    """The norm reads every gradient, the scaling reads and writes it, two ops a tensor."""
    points = rate_points(device, "fp32" if any(rate.dtype == "fp32" for rate in device.rates) else "bf16")
    moved = kernel_seconds(3 * ITEM_BYTES["fp32"] * num_elements, points["elementwise"])
    launches = 2 * num_tensors * device.launch_seconds
    return moved + launches if device.kind == "cpu" else max(moved, launches)
