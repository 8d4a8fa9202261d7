"""Activation offload (runtime/offload/activations.py): the bytes that wait on the host, and the exposed time of their transfers.

bytes    of one microbatch: Σ over offloaded blocks (kept by forward - output)                 -> activation_offload_bytes
exposed  max(0, bytes / link - forward) + max(0, bytes / link - backward)                      -> exposed_offload_seconds
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.cluster import Cluster
from meshwright.core.names import expand_names
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.links import host_link
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.memory.footprint import Footprints
from meshwright.cost.stages import StageCost


def activation_offload_bytes(plan: Plan, recipe: Recipe, local_blocks: dict[str, LocalBlock]) -> float:
    """Bytes of one microbatch that the offloaded blocks of all stages move to the host."""
    footprints, total = Footprints(plan, recipe), 0.0
    for name in expand_names(plan.offload.activations):
        local_block = local_blocks[name]
        for number, one in enumerate(local_block.kind.passes):
            if one.phase == "backward":
                total += footprints.of(local_block, name, number).rebuilt
    return total


def exposed_offload_seconds(num_bytes: float, cluster: Cluster, stages: Sequence[StageCost]) -> float:
    """Seconds of one microbatch's transfers that its forward and backward do not hide."""
    seconds = num_bytes / host_link(cluster, "offload of activations").bytes_per_second
    forward = sum(stage.forward_seconds for stage in stages)
    backward = sum(stage.backward_seconds for stage in stages)
    return max(0.0, seconds - forward) + max(0.0, seconds - backward)
