"""One collective of a step as the cost model sees it, and what passes between the stages.

    pp       a send of each tensor that crosses to the next stage, and of its gradient back   -> transfer_calls

Those inside the blocks: cost/communication/block_calls.py. Those of the state: cost/communication/step_calls.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from meshwright.core.collective import Axis, Collective, CollectiveKind, total
from meshwright.core.graph import Phase
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.links import Group, axis_group
from meshwright.cost.local_block import Division
from meshwright.cost.passes import StagePasses, handed_on_bytes, sent_sizes

ALONE = Group(1)
When = Literal["forward", "backward", "other", "update"]


@dataclass(frozen=True)
class Call:
    """One collective of a step: when it runs, and how often."""

    kind: CollectiveKind
    num_bytes: int
    count: int
    phase: When
    axis: Axis = "dp"
    group: Group = ALONE
    block: str = ""
    """The group of parameters it moves, or the block it runs in."""


def as_collectives(found: Iterable[Call]) -> tuple[Collective, ...]:
    return total(
        Collective(kind=call.kind, axis=call.axis, count=call.count, total_bytes=call.count * call.num_bytes)
        for call in found
    )


def times(calls: Iterable[Call], count: int) -> tuple[Call, ...]:
    return tuple(replace(call, count=call.count * count) for call in calls)


# ---------------------------------------------------------------- between the stages


def sends_shares(plan: Plan, recipe: Recipe) -> bool:
    """Whether each tp rank sends its share of a whole activation, which the next stage's ranks put together again."""
    return plan.mesh.tp > 1 and not (recipe.whole_transfers or plan.sequence_parallel)


def sent_bytes(passes: StagePasses, plan: Plan, divisions: dict[str, Division], recipe: Recipe) -> float:
    """Of the tensors that one rank of a stage sends to the next; their gradients come back as large."""
    size = handed_on_bytes(passes, divisions, plan.microbatch)
    return size / plan.mesh.tp if sends_shares(plan, recipe) else size


def transfer_calls(
    plan: Plan, passes: tuple[StagePasses, ...], divisions: dict[str, Division], recipe: Recipe, coordinate: int
) -> tuple[Call, ...]:
    """The sends of a rank on this coordinate in one step, and the gathers of what arrived in shares."""
    found: list[Call] = []
    for giver, taker in pairwise(range(len(plan.stages))):
        homes = plan.stages[giver].coordinate, plan.stages[taker].coordinate
        if coordinate not in homes or homes[0] == homes[1]:
            continue
        phases: tuple[Phase, Phase] = ("forward", "backward")
        goes, comes = phases if coordinate == homes[0] else phases[::-1]
        share = plan.mesh.tp if sends_shares(plan, recipe) else 1
        for size, needs_gradient in sent_sizes(passes[giver], divisions, plan.microbatch):
            if goes == "forward" or needs_gradient:
                found.append(_send(plan, round(size / share), goes))
            if share > 1 and (comes == "forward" or needs_gradient):
                group = axis_group(plan.mesh, "tp")
                found.append(Call("all_gather", round(size / share), plan.num_microbatches, comes, "tp", group))
    return tuple(found)


def _send(plan: Plan, size: int, phase: Phase) -> Call:
    return Call("send", size, plan.num_microbatches, phase, "pp", axis_group(plan.mesh, "pp"))
