"""The state a rank holds, at any moment of a step: parameters, gradients, optimizer state, gathered parameters and buffers.

Activations are counted elsewhere (peak_memory.py). Optimizer offload moves a share of the optimizer state to the host. The
device then keeps the state of the parameters that forward needs first; a single rank keeps the gradients of two blocks: the one
in backward, and the one whose gradients are on their way to the host.
"""

from __future__ import annotations

from copy import copy
from itertools import pairwise

import msgspec

from meshwright.core.cluster import Device
from meshwright.core.estimate import MemoryParts
from meshwright.core.graph import Graph, Parameter
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.memory.local_parameters import (
    groups_of,
    held_elements,
    items_of,
    local_parameters,
    moment_bytes,
    shard_degree,
    total_elements,
)
from meshwright.rules.groups import num_kept, order_of_need
from meshwright.rules.kinds import cached_in_value


class RankState:
    """The training state of one rank on one pp coordinate."""

    def __init__(self, graph: Graph, plan: Plan, recipe: Recipe, coordinate: int) -> None:
        self.plan, self.recipe = plan, recipe
        self.accumulates = plan.num_microbatches > 1
        """Whether earlier microbatches have left gradients on the rank."""
        self.items = items_of(plan, recipe)
        self.parameters = local_parameters(graph, plan, coordinate)
        self.groups = groups_of(self.parameters, plan)
        alone = [name for name in plan.blocks if name in self.groups]
        self._after = dict(pairwise(alone))
        self._before = {later: name for name, later in self._after.items()}
        self.copies = (
            graph.casting == "parameters" and recipe.system.packs and self.items.gathered < self.items.parameter
        )
        """Whether 16-bit copies of all parameters are kept in addition to the ones the optimizer updates."""
        self._whole = {name: total_elements(group) for name, group in self.groups.items()}
        self._all_whole = sum(self._whole.values())
        by_block: dict[str, list[Parameter]] = {parameter.block: [] for parameter in self.parameters}
        for parameter in self.parameters:
            by_block[parameter.block].append(parameter)
        self._made = {name: total_elements(found, trainable_only=True) for name, found in by_block.items()}
        self._held = {
            name: held_elements(found, plan, trainable_only=True) if name in self.groups else self._made[name]
            for name, found in by_block.items()
        }
        """Elements of a block's gradients: `_made` as backward makes them, `_held` as the rank keeps them once they are reduced."""
        self.trainable = held_elements(self.parameters, plan, trainable_only=True)
        self.whole_trainable = total_elements(self.parameters, trainable_only=True)
        self.sharded_gradients = self.trainable * self.items.gradient
        self.whole_gradients = self.whole_trainable * self.items.gradient
        sizes = self._shipped_sizes()
        self.shipped = sum(sizes) if plan.offload.what != "parameters" else round(sum(sizes) * plan.offload.share)
        """Elements whose optimizer state is on the host."""
        self.num_shipped = len(sizes)
        kept = 1 - self.shipped / max(self.trainable, 1)
        stored = 1 if plan.offload.what != "parameters" else kept
        stays_whole = not recipe.system.packs and plan.zero < 3  # a 16-bit parameter does
        stored_elements = total_elements(self.parameters) if stays_whole else held_elements(self.parameters, plan)
        self.parameter_bytes = stored_elements * self.items.parameter
        self.state_bytes = self.trainable * self.items.state + recipe.optimizer_scalar_bytes * sum(
            parameter.trainable for parameter in self.parameters
        )
        # the first stage needs the model's inputs, the last the labels; each is taken as half of the batch
        ends = (plan.stages[0].coordinate, plan.stages[-1].coordinate).count(coordinate)
        batch_share = ends / 2 / (1 if plan.token_blocks else plan.mesh.cp)
        self.base = MemoryParts(
            parameters=round(self.parameter_bytes * stored) + graph.buffer_bytes,
            optimizer_state=round(self.state_bytes * kept),
            inputs=round(batch_share * graph.batch_bytes.at(plan.microbatch * plan.num_microbatches)),
        )
        self.host_bytes = round(self._host_bytes(1 - stored))

    def _shipped_sizes(self) -> list[int]:
        """Elements of each trained tensor whose optimizer state is on the host; with parameter offload, of every trained tensor."""
        plan = self.plan
        if plan.offload.what == "none":
            return []
        trained = [(one.name, held_elements([one], plan)) for one in self.parameters if one.trainable]
        sizes = [size for _, size in order_of_need(trained, plan.blocks)]
        return sizes if plan.offload.what == "parameters" else sizes[num_kept(sizes, plan.offload.share) :]

    @property
    def leaves_early(self) -> bool:
        """Whether gradients are copied to the host while backward makes them."""
        plan = self.plan
        return plan.offload.what == "optimizer" and plan.world == 1 and plan.precision != "fp16"

    def _host_bytes(self, offloaded_parameter_share: float) -> float:
        """Optimizer state, master weights, gradients in transfer and their sums, on the host (runtime/offload/pieces.py)."""
        plan, items = self.plan, self.items
        if plan.offload.what == "none":
            return 0.0
        stored = plan.master_bytes
        if plan.offload.what == "parameters":
            state = self.shipped * (items.state + items.gradient)
            return state + self.parameter_bytes * offloaded_parameter_share
        slots = items.gradient * (2 if plan.offload.delayed else 1)
        master = 0 if plan.stores_16_bits or not self.recipe.system.packs else stored
        sums = stored if self.leaves_early and plan.num_microbatches > 1 else 0
        state = items.state - self.recipe.optimizer_slots * (stored - moment_bytes(plan))
        if plan.offload.where == "disk":
            return float(self.shipped * (master + slots))
        return float(self.shipped * (state + master + slots + sums))

    def before_any_backward(self) -> RankState:
        """The same rank before the first microbatch of a step has left gradients."""
        found = copy(self)
        found.accumulates = False
        return found

    def during(
        self,
        phase: str,
        block: str,
        done: set[str],
        *,
        activations: float,
        temporaries: float,
        pending_gradient_share: float = 0.0,
    ) -> MemoryParts:
        """Memory in a pass of one block.

        done: the blocks whose backward has begun in the last microbatch, this block included.
        pending_gradient_share: the share of this block's gradients that backward has still to make.
        """
        return msgspec.structs.replace(
            self.base,
            activations=round(activations),
            temporaries=round(temporaries),
            gradients=self.gradients(done, block, pending_gradient_share),
            gathered_parameters=self.gathered(block),
            communication_buffers=self.buffers(block, phase),
        )

    def during_reduction(
        self, block: str, done: set[str], device: Device, *, activations: float, temporaries: float
    ) -> MemoryParts:
        """Memory while a block's gradients are reduced in flat form; gloo copies them once more."""
        copies = 2 if device.kind == "cpu" and self.plan.mesh.dp > 1 else 1
        before = self._before.get(block, "") if self.plan.zero == 3 else ""
        gathered = self._flat(before, self.items.gathered) if before else 0
        return msgspec.structs.replace(
            self.base,
            activations=round(activations),
            temporaries=round(temporaries),
            gradients=self.gradients(done - {block}, ""),
            gathered_parameters=self.gathered(""),
            communication_buffers=gathered + copies * self._flat(block, self.items.reduced, trainable_only=True),
        )

    @property
    def packs(self) -> bool:
        """Whether parameters are sharded as fully_shard does: packed flat for every collective."""
        return self.plan.zero > 0 and self.recipe.system.packs

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced block by block in this backward; ZeRO 1 leaves it to the last microbatch."""
        return self.packs and (self.plan.zero > 1 or self.accumulates or self.plan.num_microbatches == 1)

    def gradients(self, backward_done: set[str], block: str = "", pending_gradient_share: float = 0.0) -> int:
        """Bytes of gradients while a block is in backward, in the last microbatch: sums of earlier microbatches, and its own."""
        plan = self.plan
        if plan.offload.what == "parameters":
            largest = max((self._whole[name] for name in backward_done if name in self._whole), default=0)
            return largest * self.items.gradient
        if self.leaves_early:
            return self._gradients_in_transfer(backward_done, block, pending_gradient_share)
        missing = round(pending_gradient_share * self._of({block}, sharded=False)) if block in backward_done else 0
        if plan.zero == 0:
            replicas = plan.mesh.dp * plan.mesh.cp > 1
            buckets = replicas and plan.mesh.pp == 1  # they keep them between steps; stages give their gradients up
            return (
                self.whole_gradients
                if buckets or self.accumulates
                else self._of(backward_done, sharded=False) - missing
            )
        if plan.zero == 1 and self.accumulates:
            return self.whole_gradients
        if self.packs and not self.reduces:
            return self._of(backward_done, sharded=False) - missing
        if plan.zero == 1 and not self.packs:  # reduced when all are there
            return self._of(backward_done, sharded=False)
        left = self.sharded_gradients if self.accumulates else 0
        if not self.packs:
            return left or self._of(backward_done, sharded=True)
        reduced = 0 if self.accumulates else self._of(backward_done - {block, ""}, sharded=True)
        return left + reduced + self._of(backward_done & {block, ""}, sharded=False) - missing

    def _gradients_in_transfer(self, backward_done: set[str], block: str, pending_gradient_share: float) -> int:
        """Where gradients are copied to the host early: gradients of the block in backward, and of the block before it, which are
        in transfer. Gradients whose state stays on the device are updated as they come. Their sums over microbatches stay, in the
        master weights' dtype; with clipping all of them stay, since the norm must be known first."""
        following = self._after.get(block, "")
        own = self._made.get(block, 0) * (1 - pending_gradient_share) if block in backward_done else 0
        made = own + (self._made.get(following, 0) if following in backward_done else 0)
        kept = (self.trainable - self.shipped) * (4 if self.plan.num_microbatches > 1 else 0)
        if self.recipe.clips:
            kept = max(kept, (self.trainable - self.shipped) * self.items.gradient)
        return round(made * self.items.gradient) + kept

    def _of(self, blocks: set[str], *, sharded: bool) -> int:
        """Gradients of these blocks. Gradients that belong to no group are reduced at the end, and are whole until then."""
        known = self._held if sharded else self._made
        return sum(known.get(block, 0) for block in blocks) * self.items.gradient

    def gathered(self, block: str) -> int:
        """Bytes of gathered parameters while a block runs, in addition to the stored ones."""
        if self.plan.offload.what == "parameters":
            names = {block, self._before.get(block, block)}
            return sum(self._whole.get(name, 0) for name in names) * self.items.gathered
        if self.plan.zero == 3:
            return sum(self._whole.get(name, 0) for name in {"", block}) * self.items.gathered
        return self._all_whole * self.items.gathered if self.packs or self.copies else 0

    def buffers(self, block: str, phase: str) -> int:
        """Bytes of flat copies while a block computes.

        ZeRO 3, forward: the buffer a block was gathered into stays until the next block is gathered. Backward: the next block's
        parameters are already gathered (prefetch), but not unpacked. In both: the buffer a group was reduced from stays until
        the next group is reduced; from one microbatch to the next, that is the group of the parameters in no block.
        """
        if not self.packs:
            return self.recipe.system.bucket_bytes
        gathered = (block if phase == "forward" else self._before.get(block, "")) if self.plan.zero == 3 else ""
        reduced = self._after.get(block, "") if phase == "backward" and self.reduces else ""
        carried = self.plan.zero >= 2 and self.accumulates
        flat = self._flat(gathered, self.items.gathered) if gathered else 0
        return flat + (self._flat(reduced, self.items.reduced, trainable_only=True) if reduced or carried else 0)

    @cached_in_value
    def _flat(self, group: str, item: int, trainable_only: bool = False) -> int:
        """Bytes of a group in flat form, where every shard is as long as the longest."""
        return item * sum(
            shard_degree(parameter, self.plan) * held_elements([parameter], self.plan, trainable_only=trainable_only)
            for parameter in self.groups.get(group, ())
        )

    def during_update(self, device: Device) -> MemoryParts:
        """An optimizer that loops over tensors needs temporaries of one tensor; one that batches them (CUDA), of all tensors."""
        whole = self.plan.zero == 0 or self.recipe.system.reduces_whole
        gradients = self.whole_gradients if whole else self.sharded_gradients
        if self.plan.offload.what == "parameters" or self.leaves_early:
            gradients = 0
        largest = max((held_elements([p], self.plan) for p in self.parameters), default=0)
        rooms = 2 * largest * self.items.gradient
        if device.kind == "cuda":
            rooms = 0 if self.recipe.fused_update else self.sharded_gradients
        if self.plan.offload.what != "none":
            rooms = 0
        return msgspec.structs.replace(self.base, gradients=gradients, temporaries=rooms)
