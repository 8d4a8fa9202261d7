"""What every unit of a model costs by itself, in figures of the cost room.

A *unit* is a repeated block with the blocks behind it that do not repeat; the first unit also has those before it. Units are the
smallest stages there are. Each is costed as a stage of its own, in one microbatch:

    seconds          forward, backward and what is recomputed, with communication inside the blocks
    send_seconds     what it makes to the next device, one way
    weight_bytes     gradients that its replicas add up
    state_bytes      parameters, gradients and optimizer state
    kept_bytes       what a microbatch holds between its forward and its backward

A stage of several units costs their sum; that leaves out what hides or shows only when they run together, which the estimate
of the finished plan has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Mesh, Plan, Recompute
from meshwright.core.units import ceil_div
from meshwright.cost.communication import sends_shares, sent_bytes
from meshwright.cost.estimate import Estimator
from meshwright.cost.links import axis_group, collective_seconds, send_seconds
from meshwright.cost.memory import MemoryCost
from meshwright.search.builder import Builder, Point

LARGE_PEAK = 10**12
"""Where the share that the allocator adds is read off."""


@dataclass(frozen=True)
class Unit:
    seconds: float
    send_seconds: float
    weight_bytes: float
    state_bytes: float
    kept_bytes: float


@dataclass(frozen=True)
class Loads:
    units: tuple[Unit, ...]
    room_bytes: float
    """What a device has for state and kept activations: its budget without the driver, the allocator's slack, and the most
    that any unit needs for a moment."""


def loads_of(builder: Builder, point: Point, rules: tuple[Recompute, ...] = ()) -> Loads:
    """Of all units, in the order of the model, on the groups of a point's mesh."""
    problem = builder.problem
    plan = _unit_plan(builder, point, rules)
    estimator = Estimator(problem.graph_of(plan), plan, _enough_hosts(problem.cluster, plan), problem.recipe)
    memory = MemoryCost(plan, problem.recipe, estimator.divisions, estimator.passes, estimator.holdings)
    units, working = [], 0.0
    for number, cost in enumerate(estimator.stages):
        holdings = estimator.holdings(number)
        blocks = set(plan.stages[number].blocks)
        state = holdings.base.parameters + holdings.base.optimizer_state + holdings.gradients(blocks)
        peak = memory.peak(number, estimator.order, problem.cluster.device).memory.total
        working = max(working, peak - state - memory.kept[number])
        units.append(
            Unit(
                seconds=cost.forward_seconds + cost.backward_seconds - cost.gather_each - cost.reduce_each,
                send_seconds=_send_seconds(estimator, number, point.mesh, problem.cluster),
                weight_bytes=holdings.whole_trainable * holdings.items.reduced,
                state_bytes=state,
                kept_bytes=memory.kept[number],
            )
        )
    return Loads(tuple(units), _usable_bytes(estimator, problem.budget_bytes) - working)


def reduce_seconds(weight_bytes: float, mesh: Mesh, cluster: Cluster) -> float:
    """The replicas of a stage add their gradients up."""
    return collective_seconds("all_reduce", weight_bytes, axis_group(mesh, "dp"), cluster)


def _unit_plan(builder: Builder, point: Point, rules: tuple[Recompute, ...]) -> Plan:
    """Every unit a stage; two microbatches where there are several, so that gradients are added up as in the whole step."""
    count = max(1, len(builder.repeated))
    mesh = msgspec.structs.replace(point.mesh, pp=count)
    plan = builder.plan(replace(point, mesh=mesh, schedule="1f1b", virtual=1), (1,) * count, rules)
    few = min(plan.num_microbatches, 2)
    return msgspec.structs.replace(plan, num_microbatches=few, global_batch=few * plan.microbatch * mesh.dp)


def _enough_hosts(cluster: Cluster, plan: Plan) -> Cluster:
    """A plan of single units has more stages than there are devices."""
    hosts = max(cluster.num_hosts, ceil_div(plan.world, cluster.devices_per_host))
    return msgspec.structs.replace(cluster, num_hosts=hosts)


def _send_seconds(estimator: Estimator, number: int, mesh: Mesh, cluster: Cluster) -> float:
    """Over the links between the groups of the mesh, which are fewer than the units."""
    if mesh.pp == 1 or number + 1 == len(estimator.stages):
        return 0.0
    plan, recipe = estimator.plan, estimator.recipe
    size = sent_bytes(estimator.passes[number], plan, estimator.divisions, recipe)
    seconds = send_seconds(size, axis_group(mesh, "pp"), cluster)
    if sends_shares(plan, recipe):
        seconds += collective_seconds("all_gather", size, axis_group(mesh, "tp"), cluster)
    return seconds


def _usable_bytes(estimator: Estimator, budget_bytes: int | None) -> float:
    """The largest peak that fits the budget."""
    reserved, context = estimator.beside(LARGE_PEAK)
    budget = estimator.cluster.device.memory_bytes if budget_bytes is None else budget_bytes
    return (budget - context) * LARGE_PEAK / max(reserved, LARGE_PEAK)
