"""Calls of collectives, and the seconds of one: interpolated between measured sizes, or as a ring over the links it crosses.

Ranks lie on hosts in the order of the mesh: tp next to each other, then cp, dp, pp. A group of g ranks, every s-th rank,
on hosts of D devices has r = min(g, D/s) ranks on a host (at least one) and spans h = g/r hosts. The min(s, D) parallel
groups of a host share its outer link.                                                            -> Group
    bandwidth = min(inner link, outer link / min(s, D)), each times the share collectives reach
    latency   = g - 1 hops to the last rank: h - 1 of them leave a host, the others are inner
ring of g ranks, n input bytes:                                                                   -> ring_seconds
    all-reduce       2 (latency + (g-1)/g · n / bandwidth)
    reduce-scatter      latency + (g-1)/g · n / bandwidth
    all-gather          latency + (g-1)   · n / bandwidth       n: the shard each rank gives
    all-to-all          latency + (g-1)/g · n / bandwidth
send of n bytes to the next rank along an axis: one hop + n / bandwidth of the slowest hop of the group, an outer one where
it spans hosts: the min(s, D) last ranks of a host then send at once.                             -> send_seconds
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.core.axes import Axis
from meshwright.core.cluster import Cluster, Link
from meshwright.core.collective import Collective, CollectiveKind, total
from meshwright.core.errors import InputError
from meshwright.core.plan import Mesh
from meshwright.cost.measurements import interpolated_seconds


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how far apart in the order of ranks."""

    size: int
    stride: int = 1

    def per_host(self, cluster: Cluster) -> int:
        """How many of them are on one host."""
        return max(1, min(self.size, cluster.devices_per_host // self.stride))

    def num_hosts(self, cluster: Cluster) -> int:
        return -(-self.size // self.per_host(cluster))


ALONE = Group(1)
When = Literal["forward", "backward", "other", "update"]


@dataclass(frozen=True)
class Call:
    """A collective call: its bytes, when it runs in a step, and how often."""

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


def axis_group(mesh: Mesh, axis: Axis) -> Group:
    """The ranks along one axis."""
    return Group(mesh.degrees[axis], mesh.stride(axis))


def collective_seconds(kind: CollectiveKind, num_bytes: float, group: Group, cluster: Cluster) -> float:
    """One call of this group, while the parallel groups along the same axis do the same."""
    if group.size == 1:
        return 0.0
    measurements = sorted(
        (float(point.num_bytes), point.seconds)
        for point in cluster.collectives
        if point.kind == kind and point.num_ranks == group.size
    )
    if measurements:
        return interpolated_seconds(num_bytes, measurements)
    if kind == "send":
        return send_seconds(num_bytes, group, cluster)
    return ring_seconds(kind, num_bytes, group, cluster)


def ring_seconds(kind: CollectiveKind, num_bytes: float, group: Group, cluster: Cluster) -> float:
    latency, bandwidth = ring_link(group, cluster)
    others = group.size - 1
    if kind == "all_gather":
        return latency + others * num_bytes / bandwidth
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (latency + others / group.size * num_bytes / bandwidth)


def ring_link(group: Group, cluster: Cluster) -> tuple[float, float]:
    """Latency of all hops, and bytes per second of the slowest."""
    num_outer = group.num_hosts(cluster) - 1
    crossed = _hops(group, cluster)
    latency = sum(hop.latency_seconds * (num_outer if hop.is_outer else group.size - 1 - num_outer) for hop in crossed)
    return latency, min(hop.bytes_per_second / hop.num_sharing for hop in crossed)


def send_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds of a send to the next rank along an axis, over the slowest hop, while the parallel groups do the same."""
    if group.size == 1:
        return 0.0
    crossed = _hops(group, cluster)
    return max(hop.latency_seconds + num_bytes * hop.num_sharing / hop.bytes_per_second for hop in crossed)


class Hop(NamedTuple):
    """A hop from one rank of a group to the next, inside a host or between hosts."""

    is_outer: bool
    latency_seconds: float
    """The link's own, or the family's."""
    bytes_per_second: float
    """The part of the link's bandwidth that collectives reach."""
    num_sharing: int
    """How many parallel groups along the same axis share the link."""


def _hops(group: Group, cluster: Cluster) -> list[Hop]:
    """The kinds of hops that a group has."""
    found, known = [], cluster.device.constants
    if group.per_host(cluster) > 1:
        link = _needed(cluster.intra_host, group, cluster)
        share, latency = (known.intra_host_share, known.inner_hop_seconds) if known else (1.0, 0.0)
        latency = latency if link.latency_seconds is None else link.latency_seconds
        found.append(Hop(False, latency, link.bytes_per_second * share, 1))
    if group.num_hosts(cluster) > 1:
        link = _needed(cluster.inter_host, group, cluster)
        share, latency = (known.inter_host_share, known.hop_seconds) if known else (1.0, 0.0)
        latency = latency if link.latency_seconds is None else link.latency_seconds
        sharing = min(group.stride, cluster.devices_per_host)
        found.append(Hop(True, latency, link.bytes_per_second * share, sharing))
    return found


def _needed(link: Link | None, group: Group, cluster: Cluster) -> Link:
    if link is None:
        raise InputError(
            f"cluster '{cluster.name}' has no measured collectives between {group.size} ranks and no figure for the link they "
            f"need: probe it with --nproc {group.size}, or add intra_host and inter_host"
        )
    return link


def host_link(cluster: Cluster, user: str) -> Link:
    """Between a device and its host's memory. user: what needs it, for the error where the cluster has no figure."""
    if cluster.host_link is None:
        raise InputError(
            f"cluster '{cluster.name}' has no figure for the link between device and host, which {user} needs: "
            "add host_link to its file"
        )
    return cluster.host_link
