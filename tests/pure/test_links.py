"""Seconds of a collective: rings by their formulas, groups laid over hosts, measured points before both."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import bandwidths, chain_graph, flat_plan, machine, named_machine
from strategies import quick

from meshwright.core.cluster import Cluster, CollectiveTime
from meshwright.core.collective import CollectiveKind
from meshwright.core.errors import InputError
from meshwright.core.plan import Mesh
from meshwright.cost.communication.links import (
    Group,
    axis_group,
    collective_seconds,
    ring_link,
    ring_seconds,
    send_seconds,
)
from meshwright.cost.estimate import estimate

HOP = 1e-6
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


# Rings


@quick
@given(st.integers(2, 64), st.integers(0, 10**9), bandwidths)
def test_ring_formulas(num_ranks: int, num_bytes: int, bandwidth: float) -> None:
    """N ranks, M input bytes: each sends (N-1)/N · M in N-1 hops, an all-reduce twice that; a gather starts from shards."""
    cluster, group = machine(64, bytes_per_second=bandwidth, latency_seconds=HOP), Group(num_ranks)
    hops, moved = (num_ranks - 1) * HOP, (num_ranks - 1) / num_ranks * num_bytes / bandwidth
    found = {kind: ring_seconds(kind, num_bytes, group, cluster) for kind in KINDS}
    assert found["all_reduce"] == pytest.approx(2 * (hops + moved))
    assert found["reduce_scatter"] == found["all_to_all"] == pytest.approx(hops + moved)
    assert found["all_gather"] == pytest.approx(hops + num_ranks * moved)


@quick
@given(st.integers(2, 64), st.integers(0, 10**9))
def test_an_all_reduce_is_a_reduce_scatter_and_a_gather_of_the_shards(num_ranks: int, shard: int) -> None:
    cluster, group = machine(64), Group(num_ranks)
    halves = (
        ring_seconds("reduce_scatter", num_ranks * shard, group, cluster),
        ring_seconds("all_gather", shard, group, cluster),
    )
    assert sum(halves) == pytest.approx(ring_seconds("all_reduce", num_ranks * shard, group, cluster))


def test_traffic_of_a_ring_hardly_grows_with_the_ranks() -> None:
    """2 (N-1)/N · M: never more than twice the data, whatever N."""
    cluster = machine(1024, bytes_per_second=1e9, latency_seconds=1e-15)
    seconds = [ring_seconds("all_reduce", 10**9, Group(n), cluster) for n in (2, 8, 64, 1024)]
    assert seconds == sorted(seconds)
    assert seconds[0] == pytest.approx(1.0)
    assert 1.99 < seconds[-1] < 2.0


@quick
@given(
    st.sampled_from(KINDS),
    st.integers(2, 16),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 10**9),
    bandwidths,
    bandwidths,
)
def test_a_faster_link_is_never_slower(
    kind: CollectiveKind, size: int, stride: int, num_bytes: int, one: float, other: float
) -> None:
    slow, fast = sorted((one, other))
    group = Group(size, stride)
    for name in ("bytes_per_second", "outer_bytes_per_second"):
        links = [{"bytes_per_second": 1e9, "outer_bytes_per_second": 1e9, name: speed} for speed in (slow, fast)]
        seconds = [collective_seconds(kind, num_bytes, group, machine(4, hosts=64, **link)) for link in links]
        assert seconds[1] <= seconds[0]


# Groups over hosts


@pytest.mark.parametrize(
    ("size", "stride", "per_host", "num_hosts"),
    [
        (8, 1, 8, 1),  # tp on one host
        (16, 1, 8, 2),
        (4, 2, 4, 1),
        (8, 2, 4, 2),  # dp beside tp=2
        (4, 8, 1, 4),  # dp beside tp=8: one rank a host
        (4, 16, 1, 4),  # pp beside dp=2, tp=8
        (2, 1, 2, 1),
    ],
)
def test_ranks_of_a_group_on_a_host(size: int, stride: int, per_host: int, num_hosts: int) -> None:
    cluster, group = machine(8, hosts=8), Group(size, stride)
    assert (group.per_host(cluster), group.num_hosts(cluster)) == (per_host, num_hosts)


def test_axes_lie_in_the_order_of_the_mesh() -> None:
    mesh = Mesh(pp=2, dp=4, cp=3, tp=5, ep=2)
    assert {axis: axis_group(mesh, axis) for axis in ("tp", "cp", "dp", "ep", "pp")} == {
        "tp": Group(5, 1),
        "cp": Group(3, 5),
        "dp": Group(4, 15),
        "ep": Group(2, 15),
        "pp": Group(2, 60),
    }


@pytest.mark.parametrize(
    ("size", "stride", "bandwidth"),
    [
        (8, 1, 100.0),  # inside a host
        (16, 1, 40.0),  # one ring over two hosts has the outer link to itself
        (8, 2, 20.0),  # two rings share it
        (4, 8, 5.0),  # eight share it
        (2, 16, 5.0),
    ],
)
def test_groups_beside_each_other_share_the_outer_link(size: int, stride: int, bandwidth: float) -> None:
    cluster = machine(8, hosts=4, bytes_per_second=100.0, outer_bytes_per_second=40.0)
    assert ring_link(Group(size, stride), cluster)[1] == bandwidth


def test_collectives_reach_a_share_of_a_named_link() -> None:
    cluster = named_machine(8, hosts=2, intra_host_share=0.5, inter_host_share=0.25)
    assert ring_link(Group(8), cluster)[1] == 0.5 * 1e11
    assert ring_link(Group(16), cluster)[1] == 0.25 * 1e10


def test_hops_inside_and_between_hosts() -> None:
    """A ring of g ranks has g-1 hops to the last rank: one leaves each host but the last."""
    cluster = named_machine(8, hosts=4, hop_seconds=100.0, inner_hop_seconds=1.0)
    assert ring_link(Group(8), cluster)[0] == 7
    assert ring_link(Group(32), cluster)[0] == 3 * 100 + 28
    assert ring_link(Group(4, 8), cluster)[0] == 3 * 100


def test_tensor_parallel_belongs_inside_a_host() -> None:
    """The same group costs less next to each other than across hosts."""
    selene = Cluster.named("a100-80g-selene", hosts=8)
    near, far = (collective_seconds("all_reduce", 10**8, Group(8, stride), selene) for stride in (1, 8))
    assert far > 5 * near


def test_a_send_crosses_hosts_where_the_axis_does() -> None:
    cluster = machine(8, hosts=2, bytes_per_second=100.0, outer_bytes_per_second=40.0, latency_seconds=HOP)
    assert send_seconds(1000, Group(2, 4), cluster) == pytest.approx(10 + HOP)
    assert send_seconds(1000, Group(2, 8), cluster) == pytest.approx(1000 / 5 + HOP), "eight ranks send at once"
    assert send_seconds(1000, Group(1, 8), cluster) == 0


@pytest.mark.parametrize(
    ("size", "stride", "outer", "seconds"),
    [
        (4, 4, 40.0, 1000 * 4 / 40),  # two stages a host: from the second to the next host, four ranks at once
        (8, 1, 40.0, 1000 / 100),  # all on one host
        (16, 1, 40.0, 1000 / 40),  # one rank of a host sends to the next
        (16, 1, 4000.0, 1000 / 100),  # a fast link between hosts: those inside are the slowest
        (4, 16, 40.0, 1000 * 8 / 40),  # a stage on two hosts
    ],
)
def test_the_slowest_hop_of_a_pipeline_counts(size: int, stride: int, outer: float, seconds: float) -> None:
    cluster = machine(8, hosts=8, bytes_per_second=100.0, outer_bytes_per_second=outer, latency_seconds=HOP)
    assert send_seconds(1000, Group(size, stride), cluster) == pytest.approx(seconds + HOP)


# Measured points


def test_measured_collectives_win_over_the_ring() -> None:
    points = tuple(
        CollectiveTime(kind="all_reduce", num_ranks=2, num_bytes=size, seconds=seconds)
        for size, seconds in ((1000, 0.1), (100_000, 1.0))
    )
    cluster = msgspec.structs.replace(machine(4), collectives=points)
    two, four = Group(2), Group(4)
    assert collective_seconds("all_reduce", 1000, two, cluster) == pytest.approx(0.1)
    assert collective_seconds("all_reduce", 10_000, two, cluster) == pytest.approx(0.1 * 10**0.5)
    assert collective_seconds("all_reduce", 200_000, two, cluster) == pytest.approx(2.0)
    assert collective_seconds("all_reduce", 1, two, cluster) == pytest.approx(0.1)
    assert collective_seconds("all_reduce", 1000, four, cluster) == ring_seconds("all_reduce", 1000, four, cluster)
    assert collective_seconds("all_gather", 1000, two, cluster) == ring_seconds("all_gather", 1000, two, cluster)


def test_one_rank_alone_takes_no_time() -> None:
    assert collective_seconds("all_reduce", 1000, Group(1), msgspec.structs.replace(machine(4), intra_host=None)) == 0


@pytest.mark.parametrize(("link", "hosts"), [("intra_host", 1), ("inter_host", 2)])
def test_a_link_without_a_figure_is_refused(link: str, hosts: int) -> None:
    graph = chain_graph()
    cluster = msgspec.structs.replace(machine(4, hosts=hosts), **{link: None})
    said = f"no figure for the link they need: probe it with --nproc {4 * hosts}, or add intra_host"
    with pytest.raises(InputError, match=said):
        estimate(graph, flat_plan(graph, 4 * hosts), cluster)
