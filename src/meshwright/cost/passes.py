"""Where every pass of the timeline runs: which stage, in which order.

Blocks belong to stages. What lies outside all blocks (block '') goes with the named block before it, in forward order:
what comes before the first block with the first stage, the loss after the last block with the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.core.graph import Graph, Phase, Segment
from meshwright.core.names import expand_names
from meshwright.core.plan import Plan
from meshwright.cost.division import Division


@dataclass(frozen=True)
class StagePasses:
    """The passes of one stage, in order."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]

    @cached_property
    def numbers(self) -> dict[str, tuple[int, ...]]:
        """Block → its forward passes here: of what lies outside all blocks, a stage has a part."""
        found: dict[str, tuple[int, ...]] = {}
        for segment in self.forward:
            found[segment.block] = (*found.get(segment.block, ()), segment.number)
        return found


def passes_by_stage(graph: Graph, plan: Plan) -> tuple[StagePasses, ...]:
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in expand_names(stage.blocks)}
    forward, backward = _split(graph)
    found: list[tuple[list[Segment], list[Segment]]] = [([], []) for _ in plan.stages]
    _place(forward, stage_of, 0, [lists[0] for lists in found])
    _place(backward, stage_of, len(plan.stages) - 1, [lists[1] for lists in found])
    return tuple(StagePasses(tuple(before), tuple(after)) for before, after in found)


def _split(graph: Graph) -> tuple[list[Segment], list[Segment]]:
    kinds = graph.kind_by_block
    phases: dict[Phase, list[Segment]] = {"forward": [], "backward": []}
    for segment in graph.timeline:
        phases[kinds[segment.block].passes[segment.number].phase].append(segment)
    return phases["forward"], phases["backward"]


def _place(segments: list[Segment], stage_of: dict[str, int], first: int, lists: list[list[Segment]]) -> None:
    """In order; a pass outside all stages stays where the one before it was."""
    here = first
    for segment in segments:
        here = stage_of.get(segment.block, here)
        lists[here].append(segment)


def handed_on_bytes(passes: StagePasses, divisions: dict[str, Division], samples: int) -> float:
    """What a stage gives to the next, on one rank: the result of its last named block."""
    last = next((segment for segment in reversed(passes.forward) if segment.block), None)
    if last is None:
        return 0.0
    division = divisions[last.block]
    return division.kind.passes[last.number].output_bytes.at(samples) * division.result_share("@input")
