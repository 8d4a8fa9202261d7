"""Which collectives a plan calls in one step, and how long each takes.

N ranks, m microbatches, one row per group of parameters (a block, or all that is in none):

    ZeRO 0   all-reduce of the gradients, in buckets, once a step                         -> bucket_bytes
    ZeRO 1   all-gather of each group once a step; reduce-scatter once a step
    ZeRO 2   all-gather once a step; reduce-scatter in each microbatch
    ZeRO 3   all-gather before forward and before backward in each microbatch (the rest group once); reduce-scatter in each

    measured points:   a power law between sizes                                          -> collective_seconds
    otherwise a ring over p ranks, n input bytes:
        all-reduce      2 (p-1) alpha + 2 (p-1)/p · n / bandwidth
        reduce-scatter    (p-1) alpha +   (p-1)/p · n / bandwidth
        all-gather        (p-1) alpha +   (p-1)   · n / bandwidth      (n: the shard each rank gives)
    where bandwidth is the slowest link the ring crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.core.cluster import Cluster
from meshwright.core.collective import COUNT_BYTES, LOSS_BYTES, NORM_BYTES, Collective, CollectiveKind, total
from meshwright.core.errors import InputError
from meshwright.core.graph import Graph, Parameter
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.units import MIB
from meshwright.cost.compute import ITEM_BYTES, kernel_seconds
from meshwright.cost.state import groups_of, total_elements

FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB
"""torch's DistributedDataParallel closes its first bucket at 1 MiB and the others at 25 MiB."""


@dataclass(frozen=True)
class Call:
    """One collective of a step: when it runs, and how often."""

    kind: CollectiveKind
    num_bytes: int
    count: int
    phase: str
    """forward, backward or other."""


def calls(graph: Graph, plan: Plan, recipe: Recipe) -> tuple[Call, ...]:
    """Every collective of one rank in one step."""
    found: list[Call] = []
    if plan.mesh.dp > 1:
        found += _sharded(graph, plan) if plan.zero else _replicated(graph, plan)
        found += [Call("all_reduce", COUNT_BYTES, 1, "other"), Call("all_reduce", LOSS_BYTES, 1, "other")]
    if recipe.clips and plan.zero:
        found.append(Call("all_reduce", NORM_BYTES, 1, "other"))
    return tuple(found)


def as_collectives(found: tuple[Call, ...]) -> tuple[Collective, ...]:
    return total(
        Collective(kind=call.kind, axis="dp", count=call.count, total_bytes=call.count * call.num_bytes)
        for call in found
    )


def _replicated(graph: Graph, plan: Plan) -> Iterator[Call]:
    item = stored_item_bytes(plan)
    yield from (Call("all_reduce", size, 1, "backward") for size in bucket_bytes(graph.trained, item))


def bucket_bytes(parameters: Iterable[Parameter], item_bytes: int) -> list[int]:
    """Buckets fill as gradients become ready; a full one is closed."""
    sizes: list[int] = []
    filled = 0
    for parameter in parameters:
        filled += parameter.num_elements * item_bytes
        if filled >= (BUCKET_BYTES if sizes else FIRST_BUCKET_BYTES):
            sizes.append(filled)
            filled = 0
    return [*sizes, filled] if filled else sizes


def _sharded(graph: Graph, plan: Plan) -> Iterator[Call]:
    degree, microbatches = plan.shard_degree, plan.num_microbatches
    for name, group in groups_of(graph, plan).items():
        gathered = total_elements(group, degree) * ITEM_BYTES[plan.precision]
        reduced = degree * total_elements(group, degree, trainable_only=True) * stored_item_bytes(plan)
        gathers = microbatches if plan.zero == 3 else 1
        yield Call("all_gather", gathered, gathers, "forward")
        if plan.zero == 3 and name:
            yield Call("all_gather", gathered, gathers, "backward")
        if reduced:
            yield Call("reduce_scatter", reduced, 1 if plan.zero == 1 else microbatches, "backward")


def stored_item_bytes(plan: Plan) -> int:
    """Parameters, gradients and optimizer state are kept in fp32, or fp64."""
    return 8 if plan.precision == "fp64" else 4


def collective_seconds(kind: CollectiveKind, num_bytes: int, num_ranks: int, cluster: Cluster) -> float:
    """One call between this many ranks."""
    if num_ranks == 1:
        return 0.0
    points = sorted(
        (float(point.num_bytes), point.seconds)
        for point in cluster.collectives
        if point.kind == kind and point.num_ranks == num_ranks
    )
    return kernel_seconds(num_bytes, points) if points else ring_seconds(kind, num_bytes, num_ranks, cluster)


def ring_seconds(kind: CollectiveKind, num_bytes: int, num_ranks: int, cluster: Cluster) -> float:
    latency, bandwidth = ring_link(num_ranks, cluster)
    hops = num_ranks - 1
    if kind == "all_gather":
        return hops * latency + hops * num_bytes / bandwidth
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (hops * latency + hops / num_ranks * num_bytes / bandwidth)


def ring_link(num_ranks: int, cluster: Cluster) -> tuple[float, float]:
    """Latency and bytes per second of the slowest hop of a ring over neighbouring ranks.

    One ring enters and leaves each host once, so it has the host's outer link to itself.
    """
    links = []
    if min(num_ranks, cluster.devices_per_host) > 1:
        links.append(cluster.intra_host)
    if num_ranks > cluster.devices_per_host:
        links.append(cluster.inter_host)
    if None in links:
        raise InputError(
            f"cluster '{cluster.name}' has no measured collectives between {num_ranks} ranks and no figure for the link they "
            f"need: probe it with --nproc {num_ranks}, or add intra_host and inter_host"
        )
    return max(link.latency_seconds for link in links if link), min(link.bytes_per_second for link in links if link)
