"""Cutting a model into stages. A stage is a row of *units*, the smallest parts that can be a stage of their own:

    embedding   all named blocks before the first repeated one
    a block     a repeated block, with the blocks after it that do not repeat
    head        all named blocks after the last repeated one: norm and head

`ends` says how units are shared out over s = pp · virtual stages. With n repeated blocks:                  -> unit_counts

    even    embedding and head go with the first and the last stage, which hold repeated blocks too: ⌈n/s⌉ or ⌊n/s⌋
    fewer   embedding and head count as one block each, so that the end stages hold fewer: n + 2 over s
    own     embedding and head are stages of their own: n over s - 2

Where a number does not divide, the stages at the ends are the first to hold fewer: the last, the first, the last but one, the
second, …                                                                                                    -> even_counts
An encoder and a decoder are one row of repeated blocks. The block named '' belongs to no stage.

Which tensors cross from stage to stage follows from the flow of the model (core/flow.py):

    stage of an event   a block's: the block's; the objective: the last; a function outside: the latest stage of what it
                        reads; a parameter in no block: the first                                       -> stages_of_events
    home of a tensor    the stage of the event that made it
    cut c               between stages c and c + 1: tensor t crosses it where home(t) ≤ c < stage of an event that reads t:
                        a stage hands on what a later one needs, though it does not read it itself      -> crossings

A block that reads what a later stage makes cannot be where it is: the plan is refused with its name. One that is called several
times can be nowhere, if others between its calls are on other stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from meshwright.core.errors import PlanError
from meshwright.core.flow import OBJECTIVE, Flow
from meshwright.core.graph import Graph
from meshwright.core.names import compact_names
from meshwright.core.pipeline.kinds import ScheduleKind, kind_of, placement_of
from meshwright.core.pipeline.placement import coordinate_of
from meshwright.core.plan import Plan, Stage
from meshwright.core.request import Ends

FEWEST_OWN = 3
"""Stages where embedding and head have their own."""
Cuts = tuple[tuple[int, ...], ...]
"""For every cut the numbers of the tensors that cross it, ascending."""


@dataclass(frozen=True)
class Units:
    """The units that stages are made of, in order."""

    blocks: tuple[tuple[str, ...], ...]
    """The blocks of every unit."""
    embedding: bool
    """Whether the first unit holds no repeated block."""
    head: bool
    """Whether the last unit holds none."""

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_repeated(self) -> int:
        return len(self.blocks) - self.embedding - self.head


def units_of(graph: Graph) -> Units:
    """A model without repeated blocks is one unit."""
    named = [block for block in graph.blocks if block.name]
    repeated = [place for place, block in enumerate(named) if block.repeated]
    places = {0, len(named), *repeated, *(place + 1 for place in repeated[-1:])}
    rows = tuple(tuple(block.name for block in named[begin:end]) for begin, end in pairwise(sorted(places)))
    if not repeated:
        return Units(rows, embedding=False, head=False)
    return Units(rows, embedding=repeated[0] > 0, head=repeated[-1] + 1 < len(named))


def even_stages(graph: Graph, pp: int, virtual: int, schedule: ScheduleKind, ends: Ends = "even") -> tuple[Stage, ...]:
    """All named blocks on pp · virtual stages, placed in a loop or a V as the schedule needs."""
    units = units_of(graph)
    check_ends(graph, ends)
    _check_number(graph, units, pp, virtual, ends)
    return cut_stages(units.blocks, unit_counts(units, pp * virtual, ends), pp, schedule)


def cut_stages(
    units: Sequence[Sequence[str]], counts: Sequence[int], pp: int, schedule: ScheduleKind
) -> tuple[Stage, ...]:
    """As many stages as there are counts: that many units on each. units: the blocks of each."""
    rows = (chain.from_iterable(units[begin:end]) for begin, end in pairwise(accumulate(counts, initial=0)))
    placement = placement_of(schedule)
    return tuple(
        Stage(coordinate=coordinate_of(number, pp, placement), blocks=compact_names(names))
        for number, names in enumerate(rows)
    )


def unit_counts(units: Units, num_stages: int, ends: Ends) -> list[int]:
    """Units of each stage."""
    if num_stages == 1:
        return [len(units)]
    if ends == "fewer":
        return even_counts(len(units), num_stages)
    if ends == "own":
        return [1, *even_counts(units.num_repeated, num_stages - 2), 1]
    counts = even_counts(units.num_repeated, num_stages)
    counts[0] += units.embedding
    counts[-1] += units.head
    return counts


def even_counts(num_units: int, num_stages: int) -> list[int]:
    """Fewer at the ends."""
    fewer, num_larger = divmod(num_units, num_stages)
    from_the_ends = sorted(range(num_stages), key=lambda stage: (min(stage, num_stages - 1 - stage), -stage))
    counts = [fewer] * num_stages
    for stage in from_the_ends[num_stages - num_larger :]:
        counts[stage] += 1
    return counts


def may_have(units: Units, num_stages: int, ends: Ends | None) -> bool:
    """Whether units can be shared out over `num_stages`. ends: None where they may be cut in any way."""
    return num_stages <= most_stages(units, ends) and (ends != "own" or num_stages >= FEWEST_OWN)


def most_stages(units: Units, ends: Ends | None) -> int:
    """How many stages a model can have: one at least, even without named blocks. ends: None where they may be cut in any way."""
    return max(1, units.num_repeated if ends == "even" else len(units))


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
    """The default number of stages on each coordinate: the fewest the schedule runs."""
    return kind_of(schedule).turns[0]


def check_ends(graph: Graph, ends: Ends | None) -> None:
    """Whether the model has the ends that are asked for as parts of their own."""
    if ends in (None, "even"):
        return
    units, repeated = units_of(graph), graph.repeated_blocks
    parts = {"before its first (the embedding)": units.embedding, "after its last (the head)": units.head}
    missing = [words for words, is_there in parts.items() if not is_there]
    if not repeated or len(missing) > (ends == "fewer"):
        none = f"no block {' and none '.join(missing)} repeated one" if repeated else "no repeated blocks"
        raise PlanError(
            f"ends='{ends}' counts embedding and head as parts of their own, but '{graph.model}' has {none}: make them modules "
            "beside the list of blocks, leave ends out, or give the stages in a plan file"
        )


def _check_number(graph: Graph, units: Units, pp: int, virtual: int, ends: Ends) -> None:
    num_stages, num_repeated = pp * virtual, len(graph.repeated_blocks)
    if ends == "own" and num_stages < FEWEST_OWN:
        raise PlanError(
            f"ends='own' needs {FEWEST_OWN} stages or more, for the embedding, the blocks and the head, but pp={pp} with "
            f"virtual={virtual} makes {num_stages}: raise pp or virtual, or set ends to fewer"
        )
    most = most_stages(units, ends)
    if num_stages <= most:
        return
    few = "" if num_repeated else " (modules of a list; one layer that is called again and again, as ALBERT's, is none)"
    beside = "" if ends == "even" else " beside its embedding and head"
    other = ""
    if ends == "even" and num_repeated and len(units) > most:
        asked = (
            f"ends {'to ' if num_stages <= len(units) else ''}{'own' if units.embedding and units.head else 'fewer'}"
        )
        other = f", set {asked}" if num_stages <= len(units) else f", or to {len(units)} with {asked}"
    raise PlanError(
        f"pp={pp} with virtual={virtual} needs {num_stages} stages, but '{graph.model}' has {num_repeated} repeated "
        f"blocks{few}{beside}: set pp · virtual to {most} or less{other}, or give the stages in a plan file"
    )


def stages_of_events(flow: Flow, stage_of: Mapping[str, int], num_stages: int) -> tuple[int, ...]:
    """stage_of: block → its stage."""
    homes = [0] * len(flow.tensors)
    known = {**stage_of, OBJECTIVE: num_stages - 1}
    called: set[str] = set()
    found = []
    for event in flow.events:
        latest = max((homes[number] for number in event.reads), default=0)
        stage = known.get(event.block, latest) if event.block else latest
        if latest > stage:
            raise _not_there(event.block, stage, latest, called_before=event.block in called)
        called.add(event.block)
        for number in event.makes:
            homes[number] = stage
        found.append(stage)
    return tuple(found)


def _not_there(block: str, stage: int, latest: int, called_before: bool) -> PlanError:
    if called_before:
        return PlanError(
            f"the model cannot be cut between two calls of block '{block}': it is on stage {stage}, and is called again on what "
            f"stage {latest} makes; put it and all blocks between its calls on one stage, or set pp to 1"
        )
    return PlanError(
        f"the model cannot be cut at block '{block}': it is on stage {stage}, but reads what stage {latest} makes; "
        f"put it on stage {latest} or later"
    )


def crossings(flow: Flow, stages: tuple[int, ...], num_stages: int) -> Cuts:
    """stages: of every event."""
    homes = {number: stage for event, stage in zip(flow.events, stages, strict=True) for number in event.makes}
    cuts: list[set[int]] = [set() for _ in range(num_stages - 1)]
    for event, stage in zip(flow.events, stages, strict=True):
        for number in event.reads:
            for cut in range(homes[number], stage):
                cuts[cut].add(number)
    return tuple(tuple(sorted(numbers)) for numbers in cuts)
