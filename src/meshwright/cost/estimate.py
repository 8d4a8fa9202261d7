"""The estimate of a plan: compute, communication and memory put together.

    step = m · (forward + recompute + backward) + exposed communication + update + the rest

Communication runs beside compute. A share `overlap` of the shorter of the two disappears (probed; 1 where both run at full
speed side by side, 0 where they queue for the same cores):

    exposed = communication - overlap · min(communication, compute)                           -> exposed_seconds

What is communicated once a step hides behind the one microbatch it runs in, not behind all m of them.
"""

from __future__ import annotations

from meshwright.core.cluster import Cluster
from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate, TimeParts
from meshwright.core.graph import Graph
from meshwright.core.limits import CAN, not_yet
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication import Call, as_collectives, calls, collective_seconds
from meshwright.cost.compute import ComputeCost, clip_seconds, update_seconds
from meshwright.cost.memory import peak_memory
from meshwright.cost.state import total_elements


def estimate(
    graph: Graph, plan: Plan, cluster: Cluster, recipe: Recipe | None = None, budget_bytes: int | None = None
) -> Estimate:
    """What one step of the plan takes, in time and memory, on the worst device."""
    check_costable(graph, plan, cluster)
    recipe = recipe or Recipe()
    found = calls(graph, plan, recipe)
    parts = time_parts(graph, plan, cluster, recipe, found)
    memory = peak_memory(graph, plan, recipe, cluster.device)
    budget = cluster.device.memory_bytes if budget_bytes is None else budget_bytes
    step_seconds = parts.total
    flops = graph.flops(plan.global_batch)
    return Estimate(
        step_seconds=step_seconds,
        time_seconds=parts,
        peak_bytes=memory.total,
        memory_bytes=memory,
        host_bytes=memory.total * min(plan.world, cluster.devices_per_host) if cluster.device.kind == "cpu" else 0,
        tokens_per_second=plan.global_batch * graph.tokens_per_sample / step_seconds,
        model_flops_utilisation=flops / (step_seconds * plan.world * cluster.device.peak_flops_per_second),
        budget_bytes=budget,
        fits=memory.total <= budget,
        collectives=as_collectives(found),
    )


def check_costable(graph: Graph, plan: Plan, cluster: Cluster) -> None:
    """What this version cannot cost is refused, never guessed."""
    if plan.precision != graph.precision:
        raise PlanError(
            f"the plan computes in {plan.precision}, but the graph was captured in {graph.precision}: "
            f"capture the model with precision {plan.precision}"
        )
    if plan.world > cluster.num_devices:
        raise PlanError(
            f"the plan needs {plan.world} devices, but '{cluster.name}' has {cluster.num_hosts} × {cluster.devices_per_host} = "
            f"{cluster.num_devices}: lower a degree, or add hosts with --hosts"
        )
    open_points = [part for part in not_yet(plan) if part != "fp16"]  # costed like bf16, though not run yet
    if open_points:
        raise PlanError(f"this version cannot cost {', '.join(open_points)} yet: it costs {CAN}")


def time_parts(graph: Graph, plan: Plan, cluster: Cluster, recipe: Recipe, found: tuple[Call, ...]) -> TimeParts:
    cost = ComputeCost(graph, cluster, plan.microbatch)
    microbatches = plan.num_microbatches
    recomputed = plan.recomputed("full")
    forward = microbatches * cost.phase_seconds(graph.blocks, "forward")
    backward = microbatches * cost.phase_seconds(graph.blocks, "backward")
    redone = [block for block in graph.blocks if block.name in recomputed]
    again = microbatches * cost.phase_seconds(redone, "forward")
    gather, reduce, other = (phase_seconds(found, phase, plan, cluster) for phase in ("forward", "backward", "other"))
    overlap = cluster.device.overlap_share
    elements = total_elements(graph.own_parameters, plan.shard_degree, trainable_only=True)
    update = update_seconds(elements, cluster.device)
    if recipe.clips:
        update += clip_seconds(elements, len(graph.trained), cluster.device)
    return TimeParts(
        forward=forward,
        recompute=again,
        backward=backward,
        exposed_gather=exposed_seconds(gather, forward * gathered_share(plan), overlap),
        exposed_reduce=exposed_seconds(reduce, (backward + again) * reduced_share(plan), overlap),
        update=update,
        other=other,
    )


def phase_seconds(found: tuple[Call, ...], phase: str, plan: Plan, cluster: Cluster) -> float:
    """Communication of one phase, as if nothing hid it."""
    return sum(
        call.count * collective_seconds(call.kind, call.num_bytes, plan.mesh.dp, cluster)
        for call in found
        if call.phase == phase
    )


def gathered_share(plan: Plan) -> float:
    """Share of the microbatches whose forward gathers parameters."""
    return 1.0 if plan.zero == 3 else 1 / plan.num_microbatches


def reduced_share(plan: Plan) -> float:
    """Share of the microbatches whose backward reduces gradients."""
    return 1.0 if plan.zero >= 2 else 1 / plan.num_microbatches


def exposed_seconds(communication: float, compute: float, overlap: float) -> float:
    return communication - overlap * min(communication, compute)
