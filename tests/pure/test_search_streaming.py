"""The search where parameters may be streamed: as fast as every plan of the space, only plans that run, and said in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from machines import chain_graph, machine
from strategies import quick
from test_search_offload import GENEROUS, best_of, with_hosts

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.graph import Graph
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.cost.estimate import estimate
from meshwright.report.plan_words import offload_words
from meshwright.rules.limits import not_yet
from meshwright.searching.bounds.step_seconds import SLACK
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.problem import Problem
from meshwright.searching.search import search
from meshwright.searching.space import Point, Shape

WIDE, DEEP = (40, 40), 10
"""Blocks of 6.25 KiB, so many that a window of two and two lanes of gradients are less than all of them."""
graphs = st.builds(
    chain_graph,
    st.sampled_from([3, 5, 6]),
    st.sampled_from([(8, 8), (24, 24), WIDE]),
    st.none() | st.just((10, 10)),
)
hosts = st.builds(
    lambda devices, speed, memory, link, updates: with_hosts(
        machine(devices, bytes_per_second=speed), memory, link, updates
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1e5, 1e9]),
    st.sampled_from([60_000, 300_000, GENEROUS]),
    st.sampled_from([1e5, 1e6, 1e9]),
    st.sampled_from([1e5, 1e7]),
)
budgets = st.sampled_from([12_000, 20_000, 26_000, 32_000, 40_000, 60_000])


@quick
@given(graphs, hosts, budgets, st.sampled_from([1, 2, 4]))
def test_joint_equals_exhaustive(graph: Graph, cluster: Cluster, budget: int, global_batch: int) -> None:
    """Where about one plan in ten that wins is streamed."""
    request = PlanRequest(global_batch=global_batch, compile=False, pp=1, offload_share=1.0)
    expected, found = (best_of(method, graph, cluster, budget, request) for method in ("exhaustive", "joint"))
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        event(f"offload {expected.plan.offload.what}, inputs on the {expected.plan.offload.stash}")
        assert found.estimate.step_seconds == pytest.approx(expected.estimate.step_seconds, rel=1e-9), (
            found.plan,
            expected.plan,
        )
        # where streamed plans hardly fit, bounds on their memory are weak: the claim then says so
        assert found.gap == pytest.approx(0, abs=1e-9) or not found.claim.complete
        assert not not_yet(found.plan)


def streamed(budget: int | None = None, memory: int = GENEROUS, devices: int = 1, **request: Any) -> SearchResult:
    cluster = with_hosts(machine(devices), memory, 1e9, updates=1e7)
    wish = PlanRequest(global_batch=4, compile=False, **request)
    return search(chain_graph(DEEP, WIDE), cluster, wish, budget_bytes=budget, prefer_fastest=True)


def least_without() -> int:
    """What a device needs at least when its parameters stay on it."""
    found = streamed(offload="optimizer", offload_share=1.0, recompute="full", microbatch=1)
    return found.estimate.needed_bytes


def test_parameters_are_streamed_where_nothing_simpler_fits() -> None:
    budget = least_without() * 9 // 10
    found = streamed(budget)
    assert found.plan.offload.what == "parameters"
    assert found.plan.recomputed("full") == set(found.plan.blocks)
    assert found.estimate.fits
    assert not not_yet(found.plan)
    waits = found.plan.offload.stash
    assert offload_words(found.plan).endswith(
        f"streamed through a window of 2 blocks; block inputs wait on the {waits}"
    )
    with pytest.raises(InfeasibleError):
        streamed(budget, offload="none")
    with pytest.raises(InfeasibleError):
        streamed(budget, offload="optimizer")
    with pytest.raises(InfeasibleError):
        streamed(budget, memory=found.estimate.host_bytes // 2)


def test_inputs_of_blocks_wait_on_the_host_where_the_device_has_no_room_for_them() -> None:
    roomy = streamed(offload="parameters", microbatch=4)
    assert roomy.plan.offload.stash == "device"
    tight = streamed(roomy.estimate.needed_bytes - 1, offload="parameters", microbatch=4)
    assert tight.plan.offload.stash == "host"
    assert tight.estimate.fits


def test_ranks_stream_with_zero_3_and_no_other_axis() -> None:
    result = streamed(offload="parameters", devices=4)
    for plan in (result.plan, *(other.plan for other in result.runners_up)):
        assert not not_yet(plan)
        assert plan.world == plan.mesh.dp
        assert plan.zero == 3 or plan.mesh.dp == 1
    with pytest.raises(PlanError, match="offload of parameters with pp=2"):
        streamed(offload="parameters", devices=4, pp=2)
    with pytest.raises(PlanError, match="without full recompute"):
        streamed(offload="parameters", recompute="none")


@quick
@given(graphs, hosts, st.sampled_from([1, 2, 4]), st.booleans())
def test_no_streamed_plan_beats_its_bounds(graph: Graph, cluster: Cluster, microbatch: int, both: bool) -> None:
    dp = cluster.num_devices if both else 1
    request = PlanRequest(global_batch=4 * dp, compile=False)
    drafts = Drafts(Problem(graph, cluster, request, world=dp))
    point = Point(
        Shape(1, dp, 1, 1, 1, False, microbatch, 4 // microbatch, False),
        "1f1b",
        1,
        3 if dp > 1 else 0,
        None,
        "parameters",
    )
    bounds, plan = drafts.streamed(point), drafts.plan(point, (len(drafts.units),))
    assert bounds is not None
    assert plan is not None
    for cost in (bounds.quickest, bounds.smallest):
        found = estimate(graph, cost.plan, cluster)
        assert SLACK * bounds.seconds <= found.step_seconds
        assert bounds.needs.seconds <= found.step_seconds
        assert bounds.least_bytes <= found.peak_bytes
        assert bounds.least_host_bytes <= found.host_bytes


def test_a_way_out_streams_and_says_what_to_leave_out_and_what_the_host_needs() -> None:
    budget = least_without() * 9 // 10
    with pytest.raises(InfeasibleError) as caught:
        streamed(budget, offload="none")
    assert caught.value.found is not None
    way = next(way for way in caught.value.found.ways_out if "parameters" in way.words)
    assert way.estimate.fits
    assert way.leave_out == ("--offload",)
    assert not way.not_yet
    with pytest.raises(InfeasibleError) as caught:
        streamed(budget, memory=1000)
    assert caught.value.found is not None
    way = next(way for way in caught.value.found.ways_out if "parameters" in way.words)
    assert "of memory on a host in place of" in way.words
    assert way.plan.offload.what == "parameters"
