"""The search where state may leave the devices: as fast as every plan of the space, and only where it must."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from machines import captured_in, chain_graph, flat_plan, machine, machines
from strategies import quick

from meshwright.core.cluster import Cluster, Link
from meshwright.core.errors import InfeasibleError
from meshwright.core.graph import Graph
from meshwright.core.plan import Offload
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.cost.estimate import estimate
from meshwright.searching.memory_saving.optimizer_offload import shares_of
from meshwright.searching.problem import Problem
from meshwright.searching.search import search

GENEROUS = 10**12


def with_hosts(cluster: Cluster, memory_bytes: int, link: float, updates: float = 1e3) -> Cluster:
    return msgspec.structs.replace(
        cluster,
        host_link=Link(bytes_per_second=link, origin="assumed"),
        host_memory_bytes=memory_bytes,
        host_updates_per_second=updates,
        device=msgspec.structs.replace(cluster.device, kind="cuda"),
    )


def best_of(
    method: str, graph: Graph, cluster: Cluster, budget_bytes: int, request: PlanRequest | None = None
) -> SearchResult | None:
    request = request or PlanRequest(global_batch=2, compile=False)
    try:
        return search(graph, cluster, request, budget_bytes=budget_bytes, method=method, prefer_fastest=True)
    except InfeasibleError:
        return None


@quick
@given(
    st.builds(chain_graph, st.integers(1, 3), st.sampled_from([(8, 8), (24, 24)])),
    machines,
    st.sampled_from([600, 1_500, 3_000, 6_000, 10_000, 16_000, GENEROUS]),
    st.sampled_from([500, 3_000, GENEROUS]),
    st.sampled_from([1e5, 1e9]),
)
def test_joint_equals_exhaustive(graph: Graph, cluster: Cluster, budget: int, memory: int, link: float) -> None:
    """Neither bounds nor the room for state may leave the best offload out, nor the best share of it."""
    hosts = with_hosts(cluster, memory, link, updates=1e6)
    expected, found = (best_of(method, graph, hosts, budget) for method in ("exhaustive", "joint"))
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        event(f"offload {expected.plan.offload.what}, {'all' if expected.plan.offload.share == 1 else 'a part'}")
        assert found.estimate.step_seconds == pytest.approx(expected.estimate.step_seconds, rel=1e-9), (
            found.plan,
            expected.plan,
        )


@quick
@given(st.integers(1, 3).map(chain_graph), machines)
def test_nothing_leaves_devices_that_have_room(graph: Graph, cluster: Cluster) -> None:
    found = best_of("joint", graph, with_hosts(cluster, GENEROUS, 1e9), GENEROUS)
    assert found is not None
    assert found.plan.offload.what == "none"


def needed(what: str, cluster: Cluster) -> int:
    """By the one plan there is on one device."""
    share = None if what == "none" else 1.0
    request = PlanRequest(global_batch=1, compile=False, recompute="full", offload=what, offload_share=share)
    found = search(chain_graph(2), cluster, request)
    return found.estimate.needed_bytes


def test_offload_is_chosen_where_nothing_else_fits_and_the_host_has_room() -> None:
    cluster = with_hosts(machine(1), GENEROUS, 1e9)
    budget = (needed("none", cluster) + needed("optimizer", cluster)) // 2
    request = PlanRequest(global_batch=1, compile=False)
    found = best_of("joint", chain_graph(2), cluster, budget, request)
    assert found is not None
    assert found.plan.offload.what != "none"
    assert best_of("joint", chain_graph(2), with_hosts(machine(1), 16, 1e9), budget, request) is None


def test_what_cannot_run_or_has_no_figures_is_not_looked_at() -> None:
    bare, known = machine(2), with_hosts(machine(2), GENEROUS, 1e9)
    assert Problem(chain_graph(2), bare).offloads == ("none",)
    assert Problem(chain_graph(2), known).offloads == ("none", "optimizer", "parameters")


def test_no_more_leaves_than_must() -> None:
    """The least share that fits, in steps of a fiftieth; the one below it does not. Who fixes a share keeps it."""
    graph, cluster = chain_graph(40), with_hosts(machine(1), GENEROUS, 1e9)
    request = PlanRequest(global_batch=1, compile=False, recompute="full", offload="optimizer")
    whole = search(graph, cluster, msgspec.structs.replace(request, offload_share=1.0))
    assert whole.plan.offload.share == 1
    kept = msgspec.structs.replace(request, offload_share=0.0)
    budget = (whole.estimate.needed_bytes + search(graph, cluster, kept).estimate.needed_bytes) // 2
    found = search(graph, cluster, request, budget_bytes=budget, prefer_fastest=True)
    share = found.plan.offload.share
    assert 0.3 < share < 0.7
    assert found.estimate.fits
    assert found.estimate.step_seconds <= whole.estimate.step_seconds
    lower = msgspec.structs.replace(request, offload_share=share - 0.04)
    with pytest.raises(InfeasibleError):
        search(graph, cluster, lower, budget_bytes=budget)


def test_a_part_that_leaves_wins_against_recompute_and_against_all_that_leaves() -> None:
    """With all of it away, the fastest recomputes a block; another microbatch wins once some state may stay."""
    graph, cluster, budget = chain_graph(6, (24, 24)), with_hosts(machine(1), GENEROUS, 1e9, updates=7e4), 40_000
    request = PlanRequest(global_batch=4, compile=False)
    found = best_of("joint", graph, cluster, budget, request)
    whole = best_of("joint", graph, cluster, budget, msgspec.structs.replace(request, offload_share=1.0))
    expected = best_of("exhaustive", graph, cluster, budget, request)
    assert found is not None
    assert whole is not None
    assert expected is not None
    assert found.plan.offload.what == whole.plan.offload.what == "optimizer"
    assert found.plan.offload.share < 1
    assert whole.plan.recompute
    assert not found.plan.recompute
    assert found.plan.microbatch != whole.plan.microbatch
    assert found.estimate.step_seconds == pytest.approx(expected.estimate.step_seconds, rel=1e-9)


def test_a_part_leaves_where_the_host_has_no_room_for_all() -> None:
    graph = chain_graph(6, (24, 24))
    request = PlanRequest(global_batch=4, microbatch=4, compile=False, offload="optimizer")
    whole = search(graph, with_hosts(machine(1), GENEROUS, 1e9), msgspec.structs.replace(request, offload_share=1.0))
    small = with_hosts(machine(1), whole.estimate.host_bytes * 2 // 3, 1e9)
    open_kind = msgspec.structs.replace(request, offload=None, recompute="full")
    none = search(graph, small, msgspec.structs.replace(open_kind, offload="none"))
    found = best_of("joint", graph, small, none.estimate.needed_bytes - 1, open_kind)
    assert found is not None
    assert found.plan.offload.what == "optimizer"
    assert found.estimate.host_bytes <= whole.estimate.host_bytes * 2 // 3


def test_nothing_leaves_in_16_bits_where_masters_fit_beside_them() -> None:
    """One device that stores 16-bit parameters has a use for a share of 0; several, and fp32, have none."""
    graph = captured_in("bf16", chain_graph(2, (24, 24)))
    alone, both = (Problem(graph, with_hosts(machine(n), GENEROUS, 1e9)) for n in (1, 2))
    offload = Offload(what="optimizer")
    assert shares_of(alone, flat_plan(graph, offload=offload)) == [1, 0.5, 0]
    assert shares_of(both, flat_plan(graph, 2, offload=offload)) == [1, 0.5]
    assert shares_of(alone, flat_plan(chain_graph(2), offload=offload)) == [1, 0.5]


def test_no_part_of_a_search_forgets_what_the_hosts_hold() -> None:
    """Plans are compared with others that do one thing otherwise: fixing what leaves for that is nobody's wish."""
    cluster = with_hosts(machine(2, bytes_per_second=1000.0, latency_seconds=0.01), 500, 1e5, updates=1e6)
    for budget in (3_000, GENEROUS):
        found = best_of("joint", chain_graph(2), cluster, budget)
        assert found is not None
        for plan in (found.plan, *(other.plan for other in found.runners_up)):
            assert estimate(chain_graph(2), plan, cluster).host_bytes <= 500
