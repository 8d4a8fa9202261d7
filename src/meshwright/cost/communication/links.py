"""Seconds of one collective: interpolated between measured sizes, or as a ring over the links it crosses.

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

from dataclasses import dataclass

from meshwright.core.axes import Axis
from meshwright.core.cluster import Cluster, Link
from meshwright.core.collective import CollectiveKind
from meshwright.core.errors import InputError
from meshwright.core.plan import Mesh
from meshwright.cost.interpolation import interpolated_seconds


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how far apart in the order of ranks."""

    size: int
    stride: int = 1

    def per_host(self, cluster: Cluster) -> int:
        """How many of them are on one host."""
        return max(1, min(self.size, cluster.devices_per_host // self.stride))

    def groups_sharing_link(self, cluster: Cluster) -> int:
        """How many parallel groups along the same axis share a host's outer link."""
        return min(self.stride, cluster.devices_per_host)

    def num_hosts(self, cluster: Cluster) -> int:
        return -(-self.size // self.per_host(cluster))


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
    per_host, num_hosts = group.per_host(cluster), group.num_hosts(cluster)
    latency, bandwidths = 0.0, []
    if per_host > 1:
        inner = _needed(cluster.intra_host, group, cluster)
        bandwidths.append(inner.bytes_per_second * inner_share(cluster))
        latency += (group.size - num_hosts if num_hosts > 1 else group.size - 1) * inner_hop(cluster)
    if num_hosts > 1:
        outer = _needed(cluster.inter_host, group, cluster)
        bandwidths.append(outer.bytes_per_second * outer_share(cluster) / group.groups_sharing_link(cluster))
        latency += (num_hosts - 1) * outer_hop(cluster)
    return latency, min(bandwidths)


def send_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """From one rank to the next along an axis, over the slowest hop, while the parallel groups do the same."""
    if group.size == 1:
        return 0.0
    hops = []
    if group.per_host(cluster) > 1:
        inner = _needed(cluster.intra_host, group, cluster).bytes_per_second * inner_share(cluster)
        hops.append(inner_hop(cluster) + num_bytes / inner)
    if group.num_hosts(cluster) > 1:
        outer = _needed(cluster.inter_host, group, cluster).bytes_per_second * outer_share(cluster)
        hops.append(outer_hop(cluster) + num_bytes * group.groups_sharing_link(cluster) / outer)
    return max(hops)


def inner_share(cluster: Cluster) -> float:
    return cluster.device.constants.intra_host_share if cluster.device.constants else 1.0


def outer_share(cluster: Cluster) -> float:
    return cluster.device.constants.inter_host_share if cluster.device.constants else 1.0


def inner_hop(cluster: Cluster) -> float:
    """Latency of one hop inside a host: the link's own, or the family's."""
    if cluster.intra_host and cluster.intra_host.latency_seconds is not None:
        return cluster.intra_host.latency_seconds
    return cluster.device.constants.inner_hop_seconds if cluster.device.constants else 0.0


def outer_hop(cluster: Cluster) -> float:
    if cluster.inter_host and cluster.inter_host.latency_seconds is not None:
        return cluster.inter_host.latency_seconds
    return cluster.device.constants.hop_seconds if cluster.device.constants else 0.0


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
