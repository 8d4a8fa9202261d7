"""What the passes of one microbatch take and need on one rank, found once for all plans that divide it alike.

How a plan cuts stages, what it recomputes and how it keeps its state changes neither the ops of a pass nor their collectives: a
search that costs many plans of one division asks here                                            -> microbatch_of
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph, Phase
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.compute import ComputeCost, KernelCosts
from meshwright.cost.division import Division, divide
from meshwright.cost.footprint import Footprints

InnerKey = tuple[int, Phase, tuple[int, ...], bool, bool]


@dataclass(frozen=True)
class Microbatch:
    divisions: dict[str, Division]
    compute: ComputeCost
    footprints: Footprints
    inner_seconds: dict[InnerKey, float] = field(default_factory=dict)
    """Of the collectives inside a block, by its division, phase and passes, whether it is recomputed and whether this is that."""


def microbatch_of(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    recipe: Recipe,
    divisions: dict[str, Division] | None = None,
    kernels: KernelCosts | None = None,
) -> Microbatch:
    """divisions, kernels: where they are known."""
    found = divide(graph, plan) if divisions is None else divisions
    return Microbatch(found, ComputeCost(graph, plan, cluster, recipe, kernels), Footprints(plan, recipe))


def microbatch_key(plan: Plan) -> tuple[object, ...]:
    """Plans of one graph and sharding whose key is the same share a Microbatch."""
    return (plan.mesh.ep, *work_key(plan))


def work_key(plan: Plan) -> tuple[object, ...]:
    """The same but for what is exchanged inside of blocks: over how many ranks experts lie changes nothing else."""
    mesh = plan.mesh
    in_halves = plan.splits_backward  # what it makes Python do beside every op
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
