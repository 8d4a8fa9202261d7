"""Time and memory of the passes of one microbatch on one rank, computed once for all plans that shard the blocks in one way.

Stages, recompute and ZeRO change neither the ops of a pass nor their collectives. A search that costs many plans with one sharding
shares a Microbatch between them                                                                  -> microbatch_of
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph, Phase
from meshwright.core.plan import Plan
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
    """Seconds of the collectives inside a block, by local block, phase, passes, whether the block is recomputed, and whether it is
    its second forward."""


def microbatch_of(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    recipe: Recipe,
    local_blocks: dict[str, LocalBlock] | None = None,
    kernels: KernelCosts | None = None,
) -> Microbatch:
    """local_blocks, kernels: where they are already known."""
    found = make_local_blocks(graph, plan) if local_blocks is None else local_blocks
    return Microbatch(found, ComputeCost(graph, plan, cluster, recipe, kernels), Footprints(plan, recipe))


def microbatch_key(plan: Plan) -> tuple[object, ...]:
    """Plans of one graph and sharding whose key is the same share a Microbatch."""
    return (plan.mesh.ep, *work_key(plan))


def work_key(plan: Plan) -> tuple[object, ...]:
    """The same without ep, which changes the collectives inside the blocks and nothing else."""
    mesh = plan.mesh
    in_halves = plan.splits_backward  # adds Python work to every op
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
