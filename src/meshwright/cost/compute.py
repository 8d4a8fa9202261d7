"""Seconds of compute of one microbatch through the blocks of a plan, on one rank.

op:      one kernel, from measured points (cost/points.py) or from peaks and constants (cost/kernels.py), for the share
         of its work that one rank does (cost/division.py)                                         -> op_seconds
pass:    Σ (launch + kernel)       where the host runs each op itself (CPU)
         max(Σ launch, Σ kernel)   where the host runs ahead and ops queue on the device (CUDA)     -> Work.seconds
compile: ops that only move bytes are fused: what stays inside a group of them is neither written nor read (cost/fusion.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from meshwright.core.cluster import FLOP_KINDS, Cluster, Device
from meshwright.core.graph import Graph, Kind, Op, Pass, Precision
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.block_ops import last_needed
from meshwright.cost.division import Division
from meshwright.cost.fusion import is_fused
from meshwright.cost.kernels import Kernels, MatmulSize
from meshwright.cost.points import kernel_seconds, no_rate, rate_points
from meshwright.cost.redone import Mode, redone_ops
from meshwright.rules.once import once_per_kind


@dataclass(frozen=True)
class Work:
    """Host and device seconds of some ops."""

    launch: float = 0.0
    kernel: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.launch + other.launch, self.kernel + other.kernel)

    def seconds(self, device: Device) -> float:
        return self.launch + self.kernel if device.kind == "cpu" else max(self.launch, self.kernel)


NO_WORK = Work()


class ComputeCost:
    """Looks up passes of blocks for one plan and cluster; each is costed once."""

    def __init__(
        self, graph: Graph, plan: Plan, cluster: Cluster, recipe: Recipe, kernels: KernelCosts | None = None
    ) -> None:
        """kernels: of the same graph and device, where they are known."""
        self.device = cluster.device
        self.samples = plan.microbatch
        self.plan, self.recipe = plan, recipe
        self.costs = kernels or KernelCosts(graph, cluster.device)
        self._known: dict[tuple[int, int, str], Work] = {}

    def pass_work(self, division: Division, block: str, number: int) -> Work:
        """One pass of a block."""
        key = (id(division), number, "")
        if key not in self._known:
            one = division.kind.passes[number]
            self._known[key] = self._work(division, block, one, one.op_range)
        return self._known[key]

    def redone_work(self, division: Division, block: str, mode: Mode) -> Work:
        """The forward ops that backward does again."""
        key = (id(division), -1, mode)
        if key not in self._known:
            again = redone_ops(division.kind, mode)
            end = last_needed(division.kind)
            if mode == "full" and end >= 0 and not self._recomputes_whole:  # below 0: nobody says what is kept
                again = frozenset(number for number in again if number < end)
            passes = [one for one in division.kind.passes if one.phase == "forward"]
            parts = (self._work(division, block, one, [n for n in one.op_range if n in again]) for one in passes)
            self._known[key] = sum(parts, NO_WORK)
        return self._known[key]

    @property
    def _recomputes_whole(self) -> bool:
        """Streamed blocks run again as they are: what they return is handed its gradient."""
        return self.recipe.whole_recompute or self.plan.offload.what == "parameters"

    def _work(self, division: Division, block: str, one: Pass, numbers: Iterable[int]) -> Work:
        ops, numbers = division.kind.ops, list(numbers)
        launch = forward_launch_seconds(self.plan, self.device)
        if one.phase == "backward":
            launch = self.device.backward_launch_seconds or self.device.launch_seconds
        launches = launch * sum(map(division.launches_by_op.__getitem__, numbers))
        if is_fused(block, self.plan, self.recipe):
            work = self._compiled_work(division, numbers)
        else:
            work = Work(launches, sum(ops[number].count * self.op_seconds(division, number) for number in numbers))
        if self.recipe.blocking_launches:  # there and back, and nothing runs meanwhile
            return Work(0.0, work.kernel + 2 * launches)
        return work

    def _compiled_work(self, division: Division, numbers: Iterable[int]) -> Work:
        """Flop-bound ops as they are; each group of fused ops is one kernel."""
        fused = division.fused
        wanted = set(numbers)
        alone = [number for number in sorted(wanted) if number not in fused.group_of]
        groups = {fused.group_of[number] for number in wanted if number in fused.group_of}
        kernel = sum(division.kind.ops[number].count * self.op_seconds(division, number) for number in alone)
        for group in groups:
            kernel += self.costs.fused_seconds(division, fused.members[group], fused.bytes_at(group, self.samples))
        launch = self.device.constants.compiled_launch_seconds if self.device.constants else self.device.launch_seconds
        return Work(launch * (len(alone) + len(groups)), kernel)

    def op_seconds(self, division: Division, number: int) -> float:
        return self.costs.op_seconds(division, number, self.samples)


def forward_launch_seconds(plan: Plan, device: Device) -> float:
    """Of one op: its launch, and what the plan makes Python do beside it."""
    ways = (
        (plan.mesh.tp > 1 or plan.mesh.cp > 1, device.split_launch_seconds),
        (plan.splits_backward, device.halves_launch_seconds),
    )
    added = sum(seconds - device.launch_seconds for applies, seconds in ways if applies and seconds is not None)
    return device.launch_seconds + added


class KernelCosts:
    """One kernel, once it runs, on a probed or a named device."""

    def __init__(self, graph: Graph, device: Device) -> None:
        self.device = device
        self._known: dict[tuple[object, ...], tuple[Op, float]] = {}
        """With the op, which its key names by its place in memory."""
        self.kernels = Kernels(device, device.constants) if device.constants else None
        needed = {(op.dtype, op.kind) for kind in graph.kinds for op in kind.ops}
        if self.kernels is None:
            self._points = {dtype: rate_points(device, dtype) for dtype, _ in needed}
        for dtype, kind in sorted(needed):
            if self.kernels is None and kind not in self._points[dtype]:
                raise no_rate(device, dtype, kind)
            if self.kernels is not None and dtype not in device.peaks and dtype != "fp64":
                raise no_rate(device, dtype, kind)

    def op_seconds(self, division: Division, number: int, samples: float) -> float:
        """Ops that are alike and lie alike take as long: the many of a layer of experts are costed once."""
        first = first_alike(division.kind)[number]
        key = (id(first), samples, division.lying[number])
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (first, self._op_seconds(division, number, samples))
        return known[1]

    def _op_seconds(self, division: Division, number: int, samples: float) -> float:
        op = division.kind.ops[number]
        share = division.work_share(number)
        num_bytes = share * (op.read_bytes.at(samples) + op.written_bytes.at(samples))
        if self.kernels is None:
            work = share * op.flops.at(samples) if op.kind in FLOP_KINDS else num_bytes
            return kernel_seconds(work, self._points[op.dtype][op.kind], has_least=self.device.kind == "cpu")
        if op.kind == "attention":
            return self._attention_seconds(op, share, samples)
        if op.kind in FLOP_KINDS and op.result_shape:
            return self.kernels.matmul_seconds(matmul_size(division, number, samples), op.dtype)
        return self.kernels.bytes_seconds(op, num_bytes)

    def _attention_seconds(self, op: Op, share: float, samples: float) -> float:
        assert self.kernels is not None
        shape = op.input_shapes[0] if op.input_shapes else ()
        tokens, width = (shape[-2].at(samples), shape[-1].fixed) if len(shape) >= 3 else (1e4, 128.0)
        flops = share * op.flops.at(samples) * (0.5 if op.causal else 1.0)
        return self.kernels.attention_seconds(op, flops, tokens, width)

    def copy_seconds(self, num_bytes: float, dtype: Precision) -> float:
        """Bytes read and written by plain copies."""
        if self.kernels is None:
            return kernel_seconds(
                num_bytes, rate_points(self.device, dtype)["copy"], has_least=self.device.kind == "cpu"
            )
        return num_bytes / (self.kernels.bytes_per_second * self.kernels.constants.copy_share)

    def fused_seconds(self, division: Division, members: tuple[int, ...], num_bytes: float) -> float:
        """One kernel for a group of ops that only move bytes."""
        ops = division.kind.ops
        share = max(division.work_share(number) for number in members)
        if self.kernels is None:
            points = self._points[ops[members[0]].dtype]["elementwise"]
            return kernel_seconds(share * num_bytes, points, has_least=self.device.kind == "cpu")
        known = self.kernels.constants
        return share * num_bytes / (self.kernels.bytes_per_second * known.fused_share) + known.kernel_floor_seconds


@once_per_kind
def first_alike(kind: Kind) -> tuple[Op, ...]:
    """Of every op, the first that does as much of the same work on tensors of the same shape."""
    first: dict[tuple[object, ...], Op] = {}
    return tuple(first.setdefault(_work_of(op), op) for op in kind.ops)


@once_per_kind
def weight_products(kind: Kind, number: int) -> tuple[int, ...]:
    """Matmuls of a pass whose result has no tokens: in backward, gradients of weights."""
    return tuple(
        place
        for place in kind.passes[number].op_range
        if kind.ops[place].kind in ("matmul", "convolution")
        and not any(dim.per_sample for dim in kind.ops[place].result_shape)
    )


def _work_of(op: Op) -> tuple[object, ...]:
    shapes = (op.input_shapes[:1], op.result_shape)
    sizes = (op.flops, op.read_bytes, op.written_bytes)
    return (op.name, op.kind, op.phase, op.dtype, op.causal, *shapes, *sizes)


def matmul_size(division: Division, number: int, samples: float) -> MatmulSize:
    """The sizes of a matmul (or a convolution as one) as one rank runs it."""
    op = division.kind.ops[number]
    degrees, tp = division.degrees, division.tp_degree(number)
    if op.kind == "convolution":
        spread = [dim.at(samples) for dim in op.result_shape]
        batch, rows, columns = 1.0, spread[0] * prod(spread[2:]), spread[1] if len(spread) > 1 else 1.0
    else:
        *outer, rows, columns = (1.0, 1.0, *(dim.at(samples) for dim in op.result_shape))
        batch = prod(outer)
    size = batch * rows * columns  # none for an expert that no token reaches
    depth = max(1.0, op.flops.at(samples) / (2 * size)) if size else 1.0
    has_tokens = any(dim.per_sample for dim in op.result_shape)
    if has_tokens:
        rows *= degrees.token_share
    else:
        depth *= degrees.token_share
    if division.along_tokens(number):
        rows /= tp
    elif not has_tokens:
        rows, columns = (rows / tp, columns) if rows >= columns else (rows, columns / tp)
    elif batch > 1:
        batch /= tp
    elif division.labels.results[number] == "split":
        columns /= tp
    else:
        depth /= tp
    widths = (columns, depth) if has_tokens else (rows, columns)
    return MatmulSize(batch, rows, columns, depth, tuple(round(width) for width in widths))


ADAM_SLOTS = 2


def update_bytes(slots: int, item_bytes: int = 4) -> int:
    """An optimizer reads a parameter, its gradient and its slots, and writes all but the gradient back."""
    return item_bytes * (3 + 2 * slots)


def update_seconds(num_elements: float, device: Device, slots: int = ADAM_SLOTS, item_bytes: int = 4) -> float:
    """The optimizer's pass over the elements this rank holds. The probe measures AdamW's in fp32; others move fewer bytes."""
    num_bytes = num_elements * update_bytes(slots, item_bytes)
    if device.update_elements_per_second is not None:
        return num_bytes / update_bytes(ADAM_SLOTS) / device.update_elements_per_second
    if device.constants is not None:
        return Kernels(device, device.constants).update_seconds(num_bytes)
    return kernel_seconds(num_bytes, _plain_points(device))


def clip_seconds(num_elements: float, num_tensors: int, device: Device) -> float:
    """The norm reads every gradient, the scaling reads and writes it, two ops a tensor."""
    num_bytes = 3 * 4 * num_elements
    if device.constants is not None:
        moved = Kernels(device, device.constants).update_seconds(num_bytes)
    else:
        moved = kernel_seconds(num_bytes, _plain_points(device))
    launches = 2 * num_tensors * device.launch_seconds
    return moved + launches if device.kind == "cpu" else max(moved, launches)


def accumulation_seconds(num_elements: float, num_microbatches: int, device: Device) -> float:
    """Gradients of every microbatch but the first are added to those before: two reads and a write.

    Only of a probed device: what was fitted for the others holds it.
    """
    if device.constants is not None:
        return 0.0
    return (num_microbatches - 1) * kernel_seconds(3 * 4 * num_elements, _plain_points(device))


def _plain_points(device: Device) -> list[tuple[float, float]]:
    precision: Precision = "fp32" if any(rate.dtype == "fp32" for rate in device.rates) else "bf16"
    return rate_points(device, precision)["elementwise"]
