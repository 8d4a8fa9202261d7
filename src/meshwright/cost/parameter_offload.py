"""The cost of parameter offload, in memory and time: blocks are streamed to the device (runtime/offload/streaming.py).

    W, S   bytes of an element as the device computes with it, and as it is stored
    n_b    elements of repeated block b, L blocks in all;  n the largest;  E elements outside the blocks, which stay on the device
    M, a   microbatches;  bytes of a block's output in one microbatch;  k blocks in the window

    device   E (S + W where W < S) + states · E S                 resident parameters and their state  -> _base
             k n W + 2 n S                                        the window, and two lanes of gradients
             L M a on the device, or STASH_IN_TRANSIT · a         block inputs, where the stash is
             + the fullest of: a block's backward, a piece of the loss, the first gradient outside, the update
    host     Σ n_b (W + S where W < S) + states · Σ n_b S + BUFFERS · n S + L M a where the stash is the host
             on disk: Σ n_b W + STAGED · (1 + states) n S + BUFFERS · n S
    link     forward  in Σ n_b W,          out L M a where the stash is the host
             backward in Σ n_b W + L M a,  out Σ n_b S
             each pass takes the longest of its compute and its traffic each way; traffic that compute does not hide is exposed
    update   the host updates under backward: the last block's update is exposed, or the part that backward was too short for
    disk     master weights and states are read under backward, and written as blocks are updated. A step ends when all of them are
             safely on the disk:  (1 + states) Σ n_b S / rate is exposed in full                            -> seconds_given

A block is sharded over the dp ranks: a rank has 1/dp of it on the host, and both its part and the whole in a slot on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import MemoryParts
from meshwright.core.graph import PRECISION_BYTES, Graph, Parameter
from meshwright.core.names import is_list_item
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.links import host_link
from meshwright.cost.compute.optimizer_update import update_seconds
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.memory.footprint import Footprints
from meshwright.cost.memory.peak_memory import Moment
from meshwright.cost.offload import Offloaded, disk_rate, host_update_rate
from meshwright.cost.timing import StageSeconds
from meshwright.rules.groups import PIECE_BYTES
from meshwright.rules.limits import not_yet

STASH_IN_TRANSIT = 4 + 1
"""Block inputs that are in transfer to the host, and one that waits for its transfer. On the way back there are fewer: one in use
and two in transfer (runtime/offload/stash.py, streaming.py)."""
BUFFERS = 5
"""Gradient buffers on the host, without clipping (runtime/offload/host_updates.py)."""
STAGED = 3
"""Blocks whose state is in memory while the rest is on disk (runtime/offload/disk_state.py)."""
LANES = 2


def is_streamed(plan: Plan) -> bool:
    """Whether the plan offloads parameters and would run streamed."""
    return plan.offload.what == "parameters" and not not_yet(plan)


class StreamedCost:
    def __init__(self, graph: Graph, plan: Plan, recipe: Recipe, local_blocks: dict[str, LocalBlock]) -> None:
        self.graph, self.plan, self.recipe, self.local_blocks = graph, plan, recipe, local_blocks
        self.working = PRECISION_BYTES[plan.precision]
        self.stored = plan.master_bytes
        blocks = [name for name in plan.blocks if is_list_item(name)]
        streamed: dict[str, int] = dict.fromkeys(blocks, 0)
        outside: dict[str, list[Parameter]] = {}
        for parameter in graph.parameters:
            if parameter.tied_to is not None:
                continue
            if parameter.block in streamed:
                streamed[parameter.block] += parameter.num_elements
            else:
                outside.setdefault(parameter.block, []).append(parameter)
        self.elements = {name: count for name, count in streamed.items() if count}
        self.largest = max(self.elements.values(), default=0)
        self.total = sum(self.elements.values())
        self._outside = outside
        last = max((plan.blocks.index(name) for name in self.elements), default=0)
        self._after_blocks = [one for name in plan.blocks[last + 1 :] for one in outside.get(name, ())]

    # ------------------------------------------------------------ memory

    def worst(self) -> Moment:
        moments = [*self._blocks(), *self._loss(), self._first(), Moment(0, "update", self._base(self._all_outside))]
        return max(moments, key=lambda moment: moment.memory.total)

    def _base(
        self, with_gradients: Sequence[Parameter], activations: float = 0.0, temporaries: float = 0.0
    ) -> MemoryParts:
        """Memory in use at any time. with_gradients: parameters outside the blocks whose gradients are made by then."""
        outside, degree = _count(self._all_outside), self.plan.mesh.dp
        both = self.working != self.stored
        slots = self.plan.offload.window * self.largest * self.working
        return MemoryParts(
            parameters=outside * (self.stored + (self.working if both else 0)) + self.graph.buffer_bytes,
            gradients=_count(with_gradients, trainable_only=True) * self.stored,
            optimizer_state=_count(self._all_outside, trainable_only=True) * self.stored * self.recipe.optimizer_slots,
            inputs=round(self.graph.batch_bytes.at(self.plan.microbatch * self.plan.num_microbatches)),
            gathered_parameters=slots + (slots // degree if degree > 1 else 0),
            communication_buffers=LANES * self.largest * self.stored,
            activations=round(activations),
            temporaries=round(temporaries),
        )

    def _blocks(self) -> list[Moment]:
        """The backward of a block in one microbatch, once for every kind of block."""
        footprints, found = Footprints(self.plan, self.recipe), []
        first: dict[int, str] = {}
        for name, count in self.elements.items():
            local_block = self.local_blocks[name]
            if first.setdefault(id(local_block), name) != name:
                continue
            for number, one in enumerate(local_block.kind.passes):
                if one.phase == "backward":
                    footprint = footprints.of(local_block, name, number)
                    gradients = count * self.working * (1 - footprint.pending_gradient_share)
                    rest = footprint.peak - footprint.rebuilt + gradients
                    parts = self._base(self._after_blocks, self._between_blocks + footprint.rebuilt, rest)
                    found.append(Moment(0, f"backward of {name}", parts))
        return found

    def _loss(self) -> list[Moment]:
        """A piece of the loss of the last microbatch, where a head after the blocks makes logits."""
        head = max(
            (one for one in self._after_blocks if len(one.shape) == 2), key=lambda one: one.num_elements, default=None
        )
        if head is None:
            return []
        vocab, width = head.shape
        tokens = self.plan.microbatch * self.graph.tokens_per_sample
        piece = min(tokens * vocab * 4, PIECE_BYTES) * self.stored // 4
        copies = 0 if self.working == self.stored else 2 * piece * self.working // self.stored
        sums = vocab * width * (self.stored + self.working)
        hidden = 3 * tokens * width * self.working
        before = self._after_blocks if self.plan.num_microbatches > 1 else []
        return [
            Moment(0, "a piece of the loss", self._base(before, self._between_blocks + hidden, piece + copies + sums))
        ]

    def _first(self) -> Moment:
        """When the embeddings get their gradients, in the last microbatch: the largest gradient is in memory twice for a moment."""
        largest = max((one.num_elements for one in self._all_outside), default=0)
        held = self._block_output_bytes * self.plan.num_microbatches
        return Moment(0, "the first gradients", self._base(self._all_outside, held, largest * self.working))

    @cached_property
    def _block_output_bytes(self) -> float:
        """Bytes of the largest block output in one microbatch."""
        sizes = (
            one.output_bytes.at(self.plan.microbatch) * self.local_blocks[name].result_share("@input")
            for name in self.elements
            for one in self.local_blocks[name].kind.passes
            if one.phase == "forward"
        )
        return max(sizes, default=0.0)

    @cached_property
    def _between_blocks(self) -> float:
        """Bytes between two blocks: the block inputs that are on the device, and activation gradients, one for every microbatch and
        the one that is being made."""
        num_inputs = len(self.elements) * self.plan.num_microbatches
        stashed = self._block_output_bytes * (
            min(STASH_IN_TRANSIT, num_inputs) if self.plan.offload.stash == "host" else num_inputs
        )
        return stashed + self._block_output_bytes * (self.plan.num_microbatches + 1)

    @cached_property
    def _all_outside(self) -> list[Parameter]:
        return [one for found in self._outside.values() for one in found]

    def host_bytes(self) -> int:
        """Host memory of one rank."""
        degree, slots = self.plan.mesh.dp, self.recipe.optimizer_slots
        own, largest = self.total / degree, self.largest / degree
        working, buffers = own * self.working, min(BUFFERS, len(self.elements)) * largest * self.stored
        if self.plan.offload.where == "disk":
            state = STAGED * (1 + slots) * largest * self.stored
        else:
            masters = own * self.stored if self.working != self.stored else 0.0
            state = masters + slots * own * self.stored
        return round(working + buffers + state + self._stash_traffic())

    def _stash_traffic(self) -> float:
        """Bytes of block inputs that are copied to the host in a step, and back."""
        if self.plan.offload.stash == "device":
            return 0.0
        return self._block_output_bytes * len(self.elements) * self.plan.num_microbatches

    # ------------------------------------------------------------ time

    def seconds(self, cluster: Cluster, stages: Sequence[StageSeconds]) -> Offloaded:
        count = self.plan.num_microbatches
        forward = count * sum(stage.forward_seconds for stage in stages)
        backward = count * sum(stage.backward_seconds for stage in stages)
        return self.seconds_given(cluster, forward, backward)

    def seconds_given(self, cluster: Cluster, forward: float, backward: float) -> Offloaded:
        """Exposed seconds of transfers and updates, for a step whose forward and backward take the given seconds."""
        into, out = self._link_seconds(cluster)
        stash = self._stash_traffic() / host_link(cluster, "offload").bytes_per_second
        exposed = max(0.0, max(into, stash) - forward) + max(0.0, self.backward_link_seconds(cluster) - backward)
        update = self.total / self.plan.mesh.dp / host_update_rate(self.plan, cluster)
        last = (update + out) / max(len(self.elements), 1)
        device_update = update_seconds(_count(self._all_outside, trainable_only=True), cluster.device)
        written = 0.0
        if self.plan.offload.where == "disk":  # master weights and states are read, or written durably, once a step
            state = (1 + self.recipe.optimizer_slots) * self.total / self.plan.mesh.dp * self.stored
            written = state / disk_rate(self.plan, cluster)
        return Offloaded(exposed + max(0.0, written - backward), max(last, update - backward, device_update) + written)

    def backward_link_seconds(self, cluster: Cluster) -> float:
        """Seconds of the link during backward, in its busier direction."""
        into, out = self._link_seconds(cluster)
        return max(into + self._stash_traffic() / host_link(cluster, "offload").bytes_per_second, out)

    def _link_seconds(self, cluster: Cluster) -> tuple[float, float]:
        """All blocks' parameters into the device once, and their gradients out."""
        share = self.total / self.plan.mesh.dp / host_link(cluster, "offload").bytes_per_second
        return share * self.working, share * self.stored


def _count(parameters: Sequence[Parameter], *, trainable_only: bool = False) -> int:
    return sum(one.num_elements for one in parameters if one.trainable or not trainable_only)
