"""Cutting a model into stages: consecutive blocks, the repeated ones as evenly as they go.

    n repeated blocks on s = pp · virtual stages:  n mod s stages hold ⌈n/s⌉, the others ⌊n/s⌋                  -> even_counts

The stages at the ends also hold the embedding and the head, so they are the first to hold fewer: the last, the first, the
last but one, the second, … Blocks that do not repeat go with the repeated block before them, those before the first with
the first stage. An encoder and a decoder are one row of repeated blocks. The block named '' belongs to no stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.core.errors import PlanError
from meshwright.core.graph import Block, Graph
from meshwright.core.names import compact_names
from meshwright.core.pipeline.kinds import ScheduleKind, kind_of, placement_of
from meshwright.core.pipeline.placement import coordinate_of
from meshwright.core.plan import Plan, Stage


def even_stages(graph: Graph, pp: int, virtual: int, schedule: ScheduleKind) -> tuple[Stage, ...]:
    """All named blocks on pp · virtual stages, laid in a loop or a V as the schedule asks."""
    num_repeated = len(graph.repeated_blocks)
    num_stages = pp * virtual
    if num_stages > 1 and num_repeated < num_stages:
        few = (
            ""
            if num_repeated
            else " (modules of a list; one layer that is called again and again, as ALBERT's, is none)"
        )
        raise PlanError(
            f"pp={pp} with virtual={virtual} needs {num_stages} stages, but '{graph.model}' has {num_repeated} repeated "
            f"blocks{few}: set pp · virtual to {max(num_repeated, 1)} or less, or give the stages in a plan file"
        )
    return cut_stages(graph, even_counts(num_repeated, num_stages), pp, schedule)


def cut_stages(graph: Graph, counts: Sequence[int], pp: int, schedule: ScheduleKind) -> tuple[Stage, ...]:
    """All named blocks on as many stages as there are counts: that many repeated blocks on each."""
    blocks = [block for block in graph.blocks if block.name]
    return tuple(
        Stage(coordinate=coordinate_of(number, pp, placement_of(schedule)), blocks=compact_names(names))
        for number, names in enumerate(_cut(blocks, counts))
    )


def check_blocks(graph: Graph, plan: Plan) -> None:
    """The stages hold the model's blocks, all of them and no other."""
    unknown = set(plan.blocks) - {block.name for block in graph.blocks}
    missing = {block.name for block in graph.blocks if block.name} - set(plan.blocks)
    if unknown or missing:
        name, words = (min(unknown), "which the model does not have") if unknown else (min(missing), "missing in it")
        raise PlanError(
            f"the plan's stages and the model disagree on block '{name}', {words}: make the plan for this model"
        )


def plain_virtual(schedule: ScheduleKind) -> int:
    """Stages on each coordinate where nobody says: the fewest the schedule runs."""
    return kind_of(schedule).turns[0]


def even_counts(num_repeated: int, num_stages: int) -> list[int]:
    """Repeated blocks of each stage."""
    fewer, num_larger = divmod(num_repeated, num_stages)
    from_the_ends = sorted(range(num_stages), key=lambda stage: (min(stage, num_stages - 1 - stage), -stage))
    counts = [fewer] * num_stages
    for stage in from_the_ends[num_stages - num_larger :]:
        counts[stage] += 1
    return counts


def _cut(blocks: list[Block], counts: Sequence[int]) -> Iterator[list[str]]:
    """The names of each stage; one ends where the next one's first repeated block comes."""
    remaining = iter(counts)
    names: list[str] = []
    room = next(remaining)
    for block in blocks:
        if block.repeated and room == 0:
            yield names
            names, room = [], next(remaining)
        names.append(block.name)
        room -= block.repeated
    yield names
