"""Seconds of one kernel as one rank runs it; equal ops are costed once.

probed device   interpolated between measured sizes (cost/measurements.py)
named device    from its peaks and the constants of its family (analytical_kernels.py)
"""

from __future__ import annotations

from math import prod

from meshwright.core.cluster import FLOP_KINDS, Device
from meshwright.core.graph import Graph, Kind, Op, Precision
from meshwright.cost.compute.analytical_kernels import Kernels, MatmulSize
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.measurements import MeasuredKernels, no_rate
from meshwright.rules.kinds import cached_in_value


class KernelCosts:
    """Kernel times of one graph on one device, without launches."""

    def __init__(self, graph: Graph, device: Device) -> None:
        self._known: dict[tuple[object, ...], tuple[Op, float]] = {}
        """Each entry holds its op, so that the `id` in its key stays that op's."""
        self.kernels = kernels_of(device)
        for dtype, kind in sorted({(op.dtype, op.kind) for block in graph.kinds for op in block.ops}):
            if isinstance(self.kernels, MeasuredKernels):
                is_known = kind in self.kernels.measurements(dtype)
            else:
                is_known = dtype in device.peaks or dtype == "fp64"
            if not is_known:
                raise no_rate(device, dtype, kind)

    def op_seconds(self, local_block: LocalBlock, number: int, samples: float) -> float:
        """Equal ops under equal sharding take equal time: the many equal ops of a layer of experts are costed once."""
        first = first_alike(local_block.kind)[number]
        key = (id(first), samples, local_block.cost_keys[number])
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (first, self._op_seconds(local_block, number, samples))
        return known[1]

    def _op_seconds(self, local_block: LocalBlock, number: int, samples: float) -> float:
        op, kernels = local_block.kind.ops[number], self.kernels
        share = local_block.work_share(number)
        num_bytes = share * (op.read_bytes.at(samples) + op.written_bytes.at(samples))
        flops = share * op.flops.at(samples)
        if isinstance(kernels, MeasuredKernels):
            return kernels.seconds(op.kind, op.dtype, flops if op.kind in FLOP_KINDS else num_bytes)
        if op.kind == "attention":
            shape = op.input_shapes[0] if op.input_shapes else ()
            tokens, width = (shape[-2].at(samples), shape[-1].fixed) if len(shape) >= 3 else (1e4, 128.0)
            return kernels.attention_seconds(op, flops * (0.5 if op.causal else 1.0), tokens, width)
        if op.kind in FLOP_KINDS and op.result_shape:
            return kernels.matmul_seconds(matmul_size(local_block, number, samples), op.dtype)
        return kernels.bytes_seconds(op, num_bytes)

    def copy_seconds(self, num_bytes: float, dtype: Precision) -> float:
        """num_bytes: read and written by plain copies."""
        return self.kernels.copy_seconds(num_bytes, dtype)

    def fused_seconds(self, local_block: LocalBlock, members: tuple[int, ...], num_bytes: float) -> float:
        """One kernel for a group of ops that only move bytes."""
        share = max(local_block.work_share(number) for number in members)
        return self.kernels.fused_seconds(share * num_bytes, local_block.kind.ops[members[0]].dtype)


def kernels_of(device: Device) -> Kernels | MeasuredKernels:
    return Kernels(device, device.constants) if device.constants else MeasuredKernels(device)


@cached_in_value
def first_alike(kind: Kind) -> tuple[Op, ...]:
    """For every op, the first op of the block that does the same work on tensors of the same shapes."""
    first: dict[tuple[object, ...], Op] = {}

    def work(op: Op) -> tuple[object, ...]:
        sizes = (op.input_shapes[:1], op.result_shape, op.flops, op.read_bytes, op.written_bytes)
        return (op.name, op.kind, op.phase, op.dtype, op.causal, *sizes)

    return tuple(first.setdefault(work(op), op) for op in kind.ops)


def matmul_size(local_block: LocalBlock, number: int, samples: float) -> MatmulSize:
    """The sizes of a matmul (or a convolution as one) as one rank runs it."""
    op = local_block.kind.ops[number]
    degrees, tp = local_block.degrees, local_block.tp_degree(number)
    if op.kind == "convolution":
        spread = [dim.at(samples) for dim in op.result_shape]
        batch, rows, columns = 1.0, spread[0] * prod(spread[2:]), spread[1] if len(spread) > 1 else 1.0
    else:
        *outer, rows, columns = (1.0, 1.0, *(dim.at(samples) for dim in op.result_shape))
        batch = prod(outer)
    size = batch * rows * columns  # 0 for an expert that no token reaches
    depth = max(1.0, op.flops.at(samples) / (2 * size)) if size else 1.0
    has_tokens = any(dim.per_sample for dim in op.result_shape)
    if has_tokens:
        rows *= degrees.token_share
    else:
        depth *= degrees.token_share
    if local_block.along_tokens(number):
        rows /= tp
    elif not has_tokens:
        rows, columns = (rows / tp, columns) if rows >= columns else (rows, columns / tp)
    elif batch > 1:
        batch /= tp
    elif local_block.labels.results[number] == "split":
        columns /= tp
    else:
        depth /= tp
    widths = (columns, depth) if has_tokens else (rows, columns)
    return MatmulSize(batch, rows, columns, depth, tuple(round(width) for width in widths))
