"""Which tensors cross from stage to stage, from the flow of a model (core/flow.py).

    stage of an event   a block's: the block's; the objective: the last; a function outside: the latest stage of what it
                        reads; a parameter in no block: the first                                       -> stages_of_events
    home of a tensor    the stage of the event that made it
    cut c               between stages c and c + 1: tensor t crosses it where home(t) ≤ c < stage of an event that reads t:
                        a stage hands on what a later one needs, though it does not read it itself      -> crossings

A block that reads what a later stage makes cannot be where it is: the plan is refused with its name. One that is called several
times can be nowhere, if others between its calls are on other stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.core.errors import PlanError
from meshwright.core.flow import OBJECTIVE, Flow

Cuts = tuple[tuple[int, ...], ...]
"""For every cut the numbers of the tensors that cross it, ascending."""


def stages_of_events(flow: Flow, stage_of: Mapping[str, int], num_stages: int) -> tuple[int, ...]:
    """stage_of: block → its stage."""
    homes = [0] * len(flow.tensors)
    called: set[str] = set()
    found = []
    for event in flow.events:
        latest = max((homes[number] for number in event.reads), default=0)
        stage = {**stage_of, OBJECTIVE: num_stages - 1}.get(event.block, latest) if event.block else latest
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
