"""Where every pass of the timeline runs: which stage, in which order.

Blocks belong to stages. A pass outside all blocks (block '') goes with the named block before it, in forward order: passes before
the first block with the first stage, the loss after the last block with the last stage.

The tensors that cross to the next stage follow from the graph's flow (core/flow.py); without a flow, the result of the stage's
last block crosses.                                                                                          -> Sent
A tensor that crosses is sent, and its gradient sent back. Where tp ranks each send their share of a whole activation, the ranks
of the next stage gather the shares.                                                               -> transfer_calls
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from meshwright.core.flow import Affine, Flow
from meshwright.core.graph import Graph, Phase, Segment
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.links import Call, axis_group
from meshwright.cost.local_block import LocalBlock
from meshwright.rules.stages import crossings, stages_of_events


class Sent(NamedTuple):
    """A tensor that crosses to the next stage: the block whose result it comes of, and whether its gradient comes back."""

    block: str
    num_bytes: Affine
    needs_gradient: bool


@dataclass(frozen=True)
class StagePasses:
    """The passes of one stage, in order."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    sent: tuple[Sent, ...] = ()

    @cached_property
    def numbers(self) -> dict[str, tuple[int, ...]]:
        """Block → its forward passes on this stage; a stage has some of the passes outside all blocks."""
        found: dict[str, tuple[int, ...]] = {}
        for segment in self.forward:
            found[segment.block] = (*found.get(segment.block, ()), segment.number)
        return found


def passes_by_stage(graph: Graph, plan: Plan) -> tuple[StagePasses, ...]:
    stage_of = plan.stage_of
    kinds = graph.kind_by_block
    phases: dict[Phase, list[Segment]] = {"forward": [], "backward": []}
    for segment in graph.timeline:
        phases[kinds[segment.block].passes[segment.number].phase].append(segment)
    found: list[tuple[list[Segment], list[Segment]]] = [([], []) for _ in plan.stages]
    _place(phases["forward"], stage_of, 0, [lists[0] for lists in found])
    _place(phases["backward"], stage_of, len(plan.stages) - 1, [lists[1] for lists in found])
    sent = _sent_by_cut(graph.flow, stage_of, len(plan.stages)) if graph.flow else [_last(graph, f) for f, _ in found]
    return tuple(
        StagePasses(tuple(before), tuple(after), crossing)
        for (before, after), crossing in zip(found, sent, strict=True)
    )


def _sent_by_cut(flow: Flow, stage_of: dict[str, int], num_stages: int) -> list[tuple[Sent, ...]]:
    """The tensors that every stage sends; the last sends nothing."""
    makers: dict[int, str] = {}
    for event in flow.events:
        origin = event.block or next((makers[number] for number in event.reads), "")
        makers.update(dict.fromkeys(event.makes, origin))
    cuts = crossings(flow, stages_of_events(flow, stage_of, num_stages), num_stages)
    facts = [(tensor.num_bytes, tensor.needs_gradient) for tensor in flow.tensors]
    return [*(tuple(Sent(makers[number], *facts[number]) for number in cut) for cut in cuts), ()]


def _last(graph: Graph, forward: list[Segment]) -> tuple[Sent, ...]:
    """The result of the last named block."""
    segment = next((segment for segment in reversed(forward) if segment.block), None)
    if segment is None:
        return ()
    return (Sent(segment.block, graph.kind_by_block[segment.block].passes[segment.number].output_bytes, True),)


def _place(segments: list[Segment], stage_of: dict[str, int], first: int, lists: list[list[Segment]]) -> None:
    """Assigns passes to stages, in order; a pass outside all stages stays with the pass before it."""
    here = first
    for segment in segments:
        here = stage_of.get(segment.block, here)
        lists[here].append(segment)


def sent_sizes(passes: StagePasses, local_blocks: dict[str, LocalBlock], samples: int) -> list[tuple[float, bool]]:
    """Bytes on one rank of each tensor a stage gives to the next, and whether its gradient comes back.

    A tensor that does not grow with the samples (the experts' loss, a table of biases) is whole on every rank.
    """
    shares = [local_blocks[one.block].output_share if one.num_bytes.per_sample > 0 else 1 for one in passes.sent]
    sent = zip(passes.sent, shares, strict=True)
    return [(one.num_bytes.at(samples) * share, one.needs_gradient) for one, share in sent]


def handed_on_bytes(passes: StagePasses, local_blocks: dict[str, LocalBlock], samples: int) -> float:
    """Bytes that a stage hands to the next, on one rank."""
    return sum(size for size, _ in sent_sizes(passes, local_blocks, samples))


def sends_shares(plan: Plan, recipe: Recipe) -> bool:
    """Whether each tp rank sends its share of a whole activation, and the next stage's ranks gather the shares."""
    return plan.mesh.tp > 1 and not (recipe.system.whole_transfers or plan.sequence_parallel)


def sent_bytes(passes: StagePasses, plan: Plan, local_blocks: dict[str, LocalBlock], recipe: Recipe) -> float:
    """Bytes of the tensors that one rank of a stage sends to the next stage; their gradients come back with the same size."""
    size = handed_on_bytes(passes, local_blocks, plan.microbatch)
    return size / plan.mesh.tp if sends_shares(plan, recipe) else size


def transfer_calls(
    plan: Plan, passes: tuple[StagePasses, ...], local_blocks: dict[str, LocalBlock], recipe: Recipe, coordinate: int
) -> tuple[Call, ...]:
    """The sends of a rank on this coordinate in one step, and the gathers of activations that arrived in shares."""
    found: list[Call] = []
    for giver, taker in pairwise(range(len(plan.stages))):
        homes = plan.stages[giver].coordinate, plan.stages[taker].coordinate
        if coordinate not in homes or homes[0] == homes[1]:
            continue
        phases: tuple[Phase, Phase] = ("forward", "backward")
        goes, comes = phases if coordinate == homes[0] else phases[::-1]
        share = plan.mesh.tp if sends_shares(plan, recipe) else 1
        for size, needs_gradient in sent_sizes(passes[giver], local_blocks, plan.microbatch):
            if goes == "forward" or needs_gradient:
                found.append(_send(plan, round(size / share), goes))
            if share > 1 and (comes == "forward" or needs_gradient):
                group = axis_group(plan.mesh, "tp")
                found.append(Call("all_gather", round(size / share), plan.num_microbatches, comes, "tp", group))
    return tuple(found)


def _send(plan: Plan, size: int, phase: Phase) -> Call:
    return Call("send", size, plan.num_microbatches, phase, "pp", axis_group(plan.mesh, "pp"))
