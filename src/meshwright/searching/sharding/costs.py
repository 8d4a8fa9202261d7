"""Seconds and bytes behind the integer program of sharding/program.py, each asked of the cost room.

kernel      an op whole, split, or split with a whole result (a sum over the parts): a LocalBlock in which all of the
            kind's ops are so                                                                    -> op_seconds
calls       a collective that one op asks for: the op alone in a kind, with and without it       -> summed_seconds …
state       what a rank pays for each element of a parameter, spread over the microbatches of a step: its update, under
            sequence parallel the sum of its gradient over tp where it is whole, and the price of its bytes
                                                                                                 -> state_seconds
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph, Kind, Op, Parameter, Phase
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.block_calls import block_calls
from meshwright.cost.communication.links import axis_group, collective_seconds
from meshwright.cost.compute.fusion import is_fused
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.cost.compute.optimizer_update import update_seconds
from meshwright.cost.degrees import Degrees
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.memory.local_parameters import items_of
from meshwright.rules.labels import Label, Labels

PHASES: tuple[Phase, Phase] = ("forward", "backward")


class ShardCosts:
    """Costs of the ops of one graph under one set of degrees."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        cluster: Cluster,
        recipe: Recipe,
        kernels: KernelCosts | None = None,
        *,
        bytes_price: float = 0.0,
        num_microbatches: int = 1,
    ) -> None:
        """plan: only its degrees and its microbatch are used. bytes_price: how many seconds a byte held by a rank is worth."""
        self.graph, self.plan, self.cluster, self.recipe = graph, plan, cluster, recipe
        self.bytes_price, self.num_microbatches = bytes_price, num_microbatches
        self.kernels = kernels or KernelCosts(graph, cluster.device)
        self.degrees = Degrees(plan.mesh.tp, plan.mesh.cp, plan.sequence_parallel, plan.context)
        self._local_blocks: dict[tuple[str, Label, bool], LocalBlock] = {}

    # ------------------------------------------------------------ kernels

    def op_seconds(self, kind: Kind, number: int, label: Label, *, split: bool) -> float:
        """Seconds of all `count` kernels of an op. split: whether a rank does only a part of the work."""
        local_block = self.local_block(kind, label, split=split)
        return kind.ops[number].count * self.kernels.op_seconds(local_block, number, self.plan.microbatch)

    def group_seconds(self, kind: Kind, group: int, *, split: bool) -> float:
        """Seconds of a group of fused ops."""
        local_block = self.local_block(kind, "split" if split else "whole", split=split)
        fused = local_block.fused
        return self.kernels.fused_seconds(
            local_block, fused.members[group], fused.bytes_at(group, self.plan.microbatch)
        )

    def is_fused(self, block: str) -> bool:
        return is_fused(block, self.plan, self.recipe)

    def local_block(self, kind: Kind, label: Label, *, split: bool) -> LocalBlock:
        """A local block under which all ops of the kind have this label."""
        key = (kind.name, label, split)
        if key not in self._local_blocks:
            num = len(kind.ops)
            self._local_blocks[key] = LocalBlock(kind, Labels((label,) * num, (split,) * num, (), (), {}), self.degrees)
        return self._local_blocks[key]

    def launch_seconds(self, phase: Phase, num_ops: int, *, fused: bool) -> float:
        """Seconds the host takes to launch so many kernels."""
        device = self.cluster.device
        if fused:
            return num_ops * (device.constants.compiled_launch_seconds if device.constants else device.launch_seconds)
        backward = device.backward_launch_seconds
        return num_ops * (backward if phase == "backward" and backward is not None else device.launch_seconds)

    # ------------------------------------------------------------ collectives

    def summed_seconds(self, op: Op) -> float:
        """Seconds to add up a result that is a partial sum on each rank, and of the matching collective in backward."""
        return self._seconds((op,), "whole", reduced=((0,), ())) - self._seconds((op,), "whole")

    def read_seconds(self, op: Op) -> float:
        """Seconds to add up the gradient of a tensor that column-split weights read, and of the matching collective in forward."""
        return self._seconds((op,), "split", reduced=((), (0,))) - self._seconds((op,), "split")

    def own_seconds(self, op: Op, label: Label, *, is_second_product: bool = False) -> float:
        """Seconds of the collectives that an op needs itself where its tensors have this label: a loss, a lookup, or cp.

        is_second_product: whether it is an attention's product with the values, before which one with the keys has been.
        """
        before = (op,) if is_second_product else ()
        return self._seconds((*before, op), label) - self._seconds(before, "whole")

    def _seconds(
        self, ops: tuple[Op, ...], label: Label, reduced: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    ) -> float:
        """Seconds of all collectives of these ops alone, where the last op and what it reads have this label."""
        if not ops:
            return 0.0
        alone = tuple(msgspec.structs.replace(op, inputs=_outer_inputs(op)) for op in ops)
        rest: list[Label] = ["whole"] * (len(ops) - 1)
        results = (*rest, label)
        outside = dict.fromkeys(alone[-1].inputs, label)
        labels = Labels(results, tuple(one == "split" for one in results), *reduced, outside)
        local_block = LocalBlock(Kind(name="", ops=alone), labels, self.degrees)
        calls = (call for phase in PHASES for call in block_calls(local_block, self.plan, phase))
        return sum(c.count * collective_seconds(c.kind, c.num_bytes, c.group, self.cluster) for c in calls)

    # ------------------------------------------------------------ state

    def state_seconds(self, parameter: Parameter, *, split: bool, is_lookup: bool = False) -> float:
        """What a microbatch pays for the state of a parameter that is whole or split.

        is_lookup: whether every rank looks up all of it, so that its gradient is whole.
        """
        if parameter.tied_to is not None:
            return 0.0
        items, share = items_of(self.plan, self.recipe), 1 / self.plan.mesh.tp if split else 1.0
        trained = parameter.num_elements if parameter.trainable else 0
        held = items.parameter * parameter.num_elements + (items.gradient + items.state) * trained
        found = share * (self.bytes_price * held + trained * self._update / self.num_microbatches)
        if self.plan.sequence_parallel and not split and not is_lookup:
            found += trained * items.reduced * self._sum_over_tp / self.num_microbatches
        return found

    def kept_gain(self, op: Op) -> float:
        """The worth, in seconds, of the bytes that a split result saves until backward."""
        if self.plan.sequence_parallel or op.phase != "forward":
            return 0.0
        cp = self.plan.mesh.cp if op.written_bytes.per_sample > 0 else 1
        return self.bytes_price * op.saved_bytes.at(self.plan.microbatch) / cp * (1 - 1 / self.plan.mesh.tp)

    @cached_property
    def _num_elements(self) -> int:
        return max(1, self.graph.num_parameters)

    @cached_property
    def _update(self) -> float:
        """Seconds to update one element, as part of an update of all."""
        item = 8 if self.plan.precision == "fp64" else 4
        seconds = update_seconds(self._num_elements, self.cluster.device, self.recipe.optimizer_slots, item)
        return seconds / self._num_elements

    @cached_property
    def _sum_over_tp(self) -> float:
        """Seconds to add up one byte over tp, as part of a sum of all."""
        num_bytes = self._num_elements * items_of(self.plan, self.recipe).reduced
        return collective_seconds("all_reduce", num_bytes, axis_group(self.plan.mesh, "tp"), self.cluster) / num_bytes


def _outer_inputs(op: Op) -> tuple[str, ...]:
    """The inputs of an op, with other ops of its block named as if they were in another block."""
    return tuple(source if isinstance(source, str) else f"@#{source}" for source in op.inputs)
