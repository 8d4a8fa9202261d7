"""Peak memory of one rank over a step, by category.

State (elements e, N ranks that share it, item bytes b): parameters e/N·b, gradients, optimizer slots · e/N·b.
The rest follows the graph's timeline, segment by segment, for one microbatch:

    live(s+1) = live(s) + kept(s)                  activations; a recomputed block keeps its output only
    in use during s = state + live(s) + peak(s) + gathered parameters + buffers of the collectives that run then

A recomputed block rebuilds what it dropped at the start of its backward. The peak is the largest moment; the update of the
optimizer is a moment too.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright.core.cluster import Device
from meshwright.core.estimate import MemoryParts
from meshwright.core.graph import Graph, Parameter, Segment
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication import stored_item_bytes
from meshwright.cost.compute import ITEM_BYTES
from meshwright.cost.state import groups_of, total_elements


def peak_memory(graph: Graph, plan: Plan, recipe: Recipe, device: Device) -> MemoryParts:
    """The moment of the step that needs most."""
    return max(moments(graph, plan, recipe, device), key=lambda moment: moment.total)


def moments(graph: Graph, plan: Plan, recipe: Recipe, device: Device) -> Iterator[MemoryParts]:
    """Memory in every segment of the last microbatch, and in the update."""
    state = _State(graph, plan, recipe)
    yield from _segments(graph, plan, state)
    yield state.during_update(device)


class _State:
    """What is held throughout a step, and what gradients and gathered parameters add at a moment."""

    def __init__(self, graph: Graph, plan: Plan, recipe: Recipe) -> None:
        self.graph, self.plan = graph, plan
        self.item = stored_item_bytes(plan)
        self.groups = groups_of(graph, plan)
        alone = [name for name in plan.blocks if name in self.groups]
        self._before = dict(zip(alone[1:], alone, strict=False))
        self._gathered = {
            name: total_elements(group) * ITEM_BYTES[plan.precision] for name, group in self.groups.items()
        }
        degree = plan.shard_degree
        own = graph.own_parameters
        trainable = total_elements(own, degree, trainable_only=True)
        self.base = MemoryParts(
            parameters=total_elements(own, degree) * self.item + graph.buffer_bytes,
            optimizer_state=recipe.optimizer_slots * trainable * self.item
            + recipe.optimizer_scalar_bytes * sum(parameter.trainable for parameter in own),
            inputs=round(graph.batch_bytes.at(plan.microbatch * plan.num_microbatches)),
        )
        self.sharded_gradients = trainable * self.item
        self.whole_gradients = total_elements(own, trainable_only=True) * self.item

    def gradients(self, backward_done: set[str]) -> int:
        """Bytes of gradients once the named blocks have gone backward in the last microbatch."""
        accumulating = self.plan.num_microbatches > 1
        if self.plan.zero == 0:
            buckets = self.plan.mesh.dp > 1  # replicas keep their buckets between steps
            return self.whole_gradients if buckets or accumulating else self._of(backward_done, degree=1)
        if self.plan.zero == 1 and accumulating:
            return self.whole_gradients
        if accumulating:
            return self.sharded_gradients
        return self._of(backward_done, self.plan.shard_degree)

    def _of(self, blocks: set[str], degree: int) -> int:
        """Gradients of these blocks. What is in no group of its own is reduced at the end, and whole until then."""
        alone = [p for p in self.graph.own_parameters if p.block in blocks and p.block in self.groups]
        rest = [p for p in self.graph.own_parameters if p.block in blocks and p.block not in self.groups]
        elements = total_elements(alone, degree, trainable_only=True) + total_elements(rest, trainable_only=True)
        return elements * self.item

    def gathered(self, block: str, phase: str) -> int:
        """Bytes of whole parameters beside the shards while a block runs; backward already gathers the block before."""
        if self.plan.zero == 0:
            return 0
        if self.plan.zero < 3:
            return sum(self._gathered.values())
        names = {"", block, self._before.get(block, "")} if phase == "backward" else {"", block}
        return sum(self._gathered.get(name, 0) for name in names)

    def buffers(self, block: str, phase: str) -> int:
        """Bytes a group's collective holds for a moment: the flat copy, beside the tensors it is copied from or to."""
        group = self.groups.get(block, ())
        if self.plan.zero == 0 or not block or not group:
            return 0
        if phase == "backward":
            return self._flat(group, self.item, trainable_only=True)
        return self._flat(group, ITEM_BYTES[self.plan.precision]) if self.plan.zero == 3 else 0

    def _flat(self, group: tuple[Parameter, ...], item: int, trainable_only: bool = False) -> int:
        degree = self.plan.shard_degree
        return degree * total_elements(group, degree, trainable_only=trainable_only) * item

    def during_update(self, device: Device) -> MemoryParts:
        """Optimizers that loop over tensors need one tensor's room; those that batch them (CUDA) need all at once."""
        gradients = self.whole_gradients if self.plan.zero == 0 else self.sharded_gradients
        largest = max((total_elements([p], self.plan.shard_degree) for p in self.graph.own_parameters), default=0)
        rooms = self.sharded_gradients if device.kind == "cuda" else 2 * largest * self.item
        return msgspec.structs.replace(self.base, gradients=gradients, temporaries=rooms)


def _segments(graph: Graph, plan: Plan, state: _State) -> Iterator[MemoryParts]:
    recomputed = plan.recomputed("full")
    kept = {s.block: s.kept_bytes.at(plan.microbatch) for s in graph.timeline if s.phase == "forward"}
    live = 0.0
    backward_done: set[str] = set()
    for segment in graph.timeline:
        redone = segment.block in recomputed
        peak, after = _redone(segment, kept, plan.microbatch) if redone else _plain(segment, plan.microbatch)
        if segment.phase == "backward":
            backward_done.add(segment.block)
        yield msgspec.structs.replace(
            state.base,
            activations=round(live),
            temporaries=round(peak),
            gradients=state.gradients(backward_done),
            gathered_parameters=state.gathered(segment.block, segment.phase),
            communication_buffers=state.buffers(segment.block, segment.phase),
        )
        live += after


def _plain(segment: Segment, samples: int) -> tuple[float, float]:
    return segment.peak_at(samples), segment.kept_bytes.at(samples)


def _redone(segment: Segment, kept: dict[str, float], samples: int) -> tuple[float, float]:
    """Peak above the start and change, for a block that keeps only its output and rebuilds the rest in backward."""
    output = segment.output_bytes.at(samples)
    dropped = kept[segment.block] - output
    if segment.phase == "forward":
        return segment.peak_at(samples), output
    return dropped + segment.peak_at(samples), dropped + segment.kept_bytes.at(samples)
