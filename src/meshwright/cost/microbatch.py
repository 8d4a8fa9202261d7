"""What the passes of one microbatch take and need on one rank, found once for all plans that divide it alike.

How a plan cuts stages, what it recomputes and how it keeps its state changes neither the ops of a pass nor their collectives: a
search that costs many plans of one division asks here                                            -> microbatch_of
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph, Phase
from meshwright.core.plan import SPLIT_SCHEDULES, Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.compute.block_compute import ComputeCost
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.cost.local_block import LocalBlock, make_local_blocks
from meshwright.cost.memory.footprint import Footprints

InnerKey = tuple[int, Phase, tuple[int, ...], bool, bool]


@dataclass(frozen=True)
class Microbatch:
    local_blocks: dict[str, LocalBlock]
    compute: ComputeCost
    footprints: Footprints
    inner_seconds: dict[InnerKey, float] = field(default_factory=dict)
    """Of the collectives inside a block, by its division, phase and passes, whether it is recomputed and whether this is that."""


def microbatch_of(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    recipe: Recipe,
    local_blocks: dict[str, LocalBlock] | None = None,
    kernels: KernelCosts | None = None,
) -> Microbatch:
    """divisions, kernels: where they are known."""
    found = make_local_blocks(graph, plan) if local_blocks is None else local_blocks
    return Microbatch(found, ComputeCost(graph, plan, cluster, recipe, kernels), Footprints(plan, recipe))


def microbatch_key(plan: Plan) -> tuple[object, ...]:
    """Plans of one graph and sharding whose key is the same share a Microbatch."""
    return (plan.mesh.ep, *work_key(plan))


def work_key(plan: Plan) -> tuple[object, ...]:
    """The same but for what is exchanged inside of blocks: over how many ranks experts lie changes nothing else."""
    mesh = plan.mesh
    in_halves = mesh.pp > 1 and plan.schedule in SPLIT_SCHEDULES  # what it makes Python do beside every op
    return (
        mesh.tp,
        mesh.cp,
        plan.context,
        plan.sequence_parallel,
        plan.microbatch,
        plan.compile,
        plan.casting,
        in_halves,
    )
