"""What passes between pipeline stages: a send of each tensor that crosses to the next stage, and a send of its gradient back.

Where tp ranks each send their share of a whole activation, the ranks of the next stage gather the shares.   -> transfer_calls
"""

from __future__ import annotations

from itertools import pairwise

from meshwright.core.graph import Phase
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.collective_call import Call
from meshwright.cost.communication.links import axis_group
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.passes import StagePasses, handed_on_bytes, sent_sizes


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
