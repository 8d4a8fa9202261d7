"""Seconds of compute of one microbatch through the blocks of a plan, on one rank.

op:      one kernel, for the share of its work that one rank does (kernel_costs.py)                -> op_seconds
pass:    Σ (launch + kernel)       where the host runs each op itself (CPU)
         max(Σ launch, Σ kernel)   where the host runs ahead and ops queue on the device (CUDA)     -> Work.seconds
compile: ops that only move bytes are fused into groups; results that stay inside a group are neither written nor read (fusion.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.core.cluster import Cluster, Device
from meshwright.core.graph import Graph, Kind, Pass
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.compute.fusion import is_fused
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.cost.compute.recomputed_ops import ActivationMode, last_needed, recomputed_ops
from meshwright.cost.local_block import LocalBlock
from meshwright.rules.kinds import cached_in_value


@dataclass(frozen=True)
class Work:
    """Seconds of some ops: the host launches them, the device runs their kernels."""

    launch: float = 0.0
    kernel: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.launch + other.launch, self.kernel + other.kernel)

    def seconds(self, device: Device) -> float:
        return self.launch + self.kernel if device.kind == "cpu" else max(self.launch, self.kernel)


NO_WORK = Work()


class ComputeCost:
    """The work of every pass of every block, for one plan and cluster; each is costed once."""

    def __init__(
        self, graph: Graph, plan: Plan, cluster: Cluster, recipe: Recipe, kernels: KernelCosts | None = None
    ) -> None:
        """kernels: kernel costs of the same graph and device, if they are already known."""
        self.device = cluster.device
        self.samples = plan.microbatch
        self.plan, self.recipe = plan, recipe
        self.costs = kernels or KernelCosts(graph, cluster.device)
        self._known: dict[tuple[int, int, str], Work] = {}

    def pass_work(self, local_block: LocalBlock, block: str, number: int) -> Work:
        """One pass of a block."""
        key = (id(local_block), number, "")
        if key not in self._known:
            one = local_block.kind.passes[number]
            self._known[key] = self._work(local_block, block, one, one.op_range)
        return self._known[key]

    def recompute_work(self, local_block: LocalBlock, block: str, mode: ActivationMode) -> Work:
        """The forward ops that backward recomputes."""
        key = (id(local_block), -1, mode)
        if key not in self._known:
            again = recomputed_ops(local_block.kind, mode)
            end = last_needed(local_block.kind)
            # a streamed block runs whole: its output must exist to receive its gradient
            is_whole = self.recipe.system.whole_recompute or self.plan.offload.what == "parameters"
            if mode == "full" and end >= 0 and not is_whole:  # below 0: the graph names no kept tensor
                again = frozenset(number for number in again if number < end)
            passes = [one for one in local_block.kind.passes if one.phase == "forward"]
            parts = (self._work(local_block, block, one, [n for n in one.op_range if n in again]) for one in passes)
            self._known[key] = sum(parts, NO_WORK)
        return self._known[key]

    def _work(self, local_block: LocalBlock, block: str, one: Pass, numbers: Iterable[int]) -> Work:
        ops, numbers = local_block.kind.ops, list(numbers)
        launch = forward_launch_seconds(self.plan, self.device)
        if one.phase == "backward":
            launch = self.device.backward_launch_seconds or self.device.launch_seconds
        launches = launch * sum(map(local_block.launches_by_op.__getitem__, numbers))
        if is_fused(block, self.plan, self.recipe):
            work = self._compiled_work(local_block, numbers)
        else:
            work = Work(launches, sum(ops[number].count * self.op_seconds(local_block, number) for number in numbers))
        if self.recipe.system.blocking_launches:  # the host waits for every kernel, and launches nothing meanwhile
            return Work(0.0, work.kernel + 2 * launches)
        return work

    def _compiled_work(self, local_block: LocalBlock, numbers: Iterable[int]) -> Work:
        """Flop-bound ops one by one; each group of fused ops is one kernel."""
        fused = local_block.fused
        wanted = set(numbers)
        alone = [number for number in sorted(wanted) if number not in fused.group_of]
        groups = {fused.group_of[number] for number in wanted if number in fused.group_of}
        kernel = sum(local_block.kind.ops[number].count * self.op_seconds(local_block, number) for number in alone)
        for group in groups:
            kernel += self.costs.fused_seconds(local_block, fused.members[group], fused.bytes_at(group, self.samples))
        launch = self.device.constants.compiled_launch_seconds if self.device.constants else self.device.launch_seconds
        return Work(launch * (len(alone) + len(groups)), kernel)

    def op_seconds(self, local_block: LocalBlock, number: int) -> float:
        return self.costs.op_seconds(local_block, number, self.samples)


def forward_launch_seconds(plan: Plan, device: Device) -> float:
    """Seconds to launch one op, with the Python work that the plan's split tensors or split backward add to it."""
    ways = (
        (plan.mesh.tp > 1 or plan.mesh.cp > 1, device.split_launch_seconds),
        (plan.splits_backward, device.halves_launch_seconds),
    )
    added = sum(seconds - device.launch_seconds for applies, seconds in ways if applies and seconds is not None)
    return device.launch_seconds + added


@cached_in_value
def weight_products(kind: Kind, number: int) -> tuple[int, ...]:
    """Matmuls of a pass whose result has no tokens: in backward, gradients of weights."""
    return tuple(
        place
        for place in kind.passes[number].op_range
        if kind.ops[place].kind in ("matmul", "convolution")
        and not any(dim.per_sample for dim in kind.ops[place].result_shape)
    )
