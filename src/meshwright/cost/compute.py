"""Seconds of compute.

op:      t = launch + work / rate(kind, size)       where the host starts each op and waits for it (CPU)
         t = max(launch, work / rate(kind, size))   where ops queue on the device (CUDA)
         work: flops for matmul, convolution, attention; bytes read and written for the rest       -> op_seconds
rate:    seconds measured at a few sizes, a power law between them; below the smallest the time stays, above the
         largest the rate stays                                                                     -> kernel_seconds
update:  elements held by this rank / measured rate, or 7 · 4 bytes each through memory             -> update_seconds
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

from meshwright.core.cluster import Cluster, Device
from meshwright.core.errors import InputError
from meshwright.core.graph import Graph, Kind, Op, OpKind, Phase
from meshwright.core.plan import Precision

FLOP_KINDS = ("matmul", "convolution", "attention")
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
CAPTURED_ITEM_BYTES = 4
"""Graphs are captured in fp32; bytes scale with the precision's item."""
UPDATE_BYTES_PER_ELEMENT = 28
"""AdamW reads parameter, gradient and two moments, and writes three of them back, in fp32."""


class ComputeCost:
    """Seconds by block kind and phase for one microbatch size; each op's time is looked up once."""

    def __init__(self, graph: Graph, cluster: Cluster, precision: Precision, microbatch: int) -> None:
        self.device = cluster.device
        self.precision = precision
        self.microbatch = microbatch
        self._points = rate_points(cluster.device, precision)
        self._seconds = {
            (kind.name, phase): self._phase_seconds(kind, phase)
            for kind in graph.kinds
            for phase in ("forward", "backward")
        }

    def seconds(self, kind: str, phase: Phase) -> float:
        return self._seconds[kind, phase]

    def _phase_seconds(self, kind: Kind, phase: Phase) -> float:
        return sum(op.count * self.op_seconds(op) for op in kind.ops if op.phase == phase)

    def op_seconds(self, op: Op) -> float:
        scale = ITEM_BYTES[self.precision] / CAPTURED_ITEM_BYTES
        num_bytes = scale * (op.read_bytes.at(self.microbatch) + op.written_bytes.at(self.microbatch))
        flops = op.flops.at(self.microbatch)
        work = flops if op.kind in FLOP_KINDS else num_bytes
        kernel = kernel_seconds(work, self._points[op.kind])
        if op.kind in FLOP_KINDS and len(self._points[op.kind]) == 1:  # a vendor's figure knows no small sizes
            kernel = max(kernel, kernel_seconds(num_bytes, self._points["copy"]))
        if self.device.kind == "cpu":
            return self.device.launch_seconds + kernel
        return max(self.device.launch_seconds, kernel)


def rate_points(device: Device, precision: Precision) -> dict[OpKind, list[tuple[float, float]]]:
    """(size, seconds) by kind, sizes ascending. A CPU runs fp64 at half its fp32 rate where that was not measured."""
    found: dict[OpKind, list[tuple[float, float]]] = {}
    for rate in device.rates:
        if rate.dtype == precision:
            found.setdefault(rate.kind, []).append((rate.size, rate.size / rate.per_second))
    if not found and precision == "fp64" and device.kind == "cpu":
        return {kind: [(s, 2 * t) for s, t in points] for kind, points in rate_points(device, "fp32").items()}
    missing = {rate.kind for rate in device.rates} - set(found)
    if missing:
        known = ", ".join(sorted({rate.dtype for rate in device.rates}))
        raise InputError(
            f"device '{device.name}' has no {precision} rate for {', '.join(sorted(missing))}: use one of {known}, or give a "
            "cluster file that has it"
        )
    return {kind: sorted(points) for kind, points in found.items()}


def kernel_seconds(work: float, points: list[tuple[float, float]]) -> float:
    """Interpolate between measured sizes; a power law between two points."""
    if work <= 0:
        return 0.0
    first_size, first_seconds = points[0]
    last_size, last_seconds = points[-1]
    if work >= last_size:
        return last_seconds * work / last_size
    if work <= first_size:
        return first_seconds if len(points) > 1 else first_seconds * work / first_size
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
