"""The joint search against the exhaustive one, and what must hold for every model and machine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import chain_graph, machine, machines, measured_machines
from strategies import quick

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError
from meshwright.core.graph import Block, Graph, Segment
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.searching.choice import complexity
from meshwright.searching.search import search

GENEROUS = 10**12
small_graphs = st.integers(1, 4).map(chain_graph)
batches = st.sampled_from([1, 2, 3, 4, 6])
large_batches = st.sampled_from([6, 24, 32])
budgets = st.sampled_from([3_000, 6_000, 12_000, 40_000, GENEROUS])


def best_of(method: str, graph: Graph, cluster: Cluster, global_batch: int, budget_bytes: int) -> SearchResult | None:
    try:
        request = PlanRequest(global_batch=global_batch)
        return search(graph, cluster, request, budget_bytes=budget_bytes, method=method, prefer_fastest=True)
    except InfeasibleError:
        return None


@quick
@given(small_graphs, machines, batches, budgets)
def test_joint_equals_exhaustive(graph: Graph, cluster: Cluster, global_batch: int, budget_bytes: int) -> None:
    """The fastest plan of all, proven: no bound may cut it off, no cut or recompute be overlooked."""
    check_equals_exhaustive(graph, cluster, global_batch, budget_bytes)


@quick
@given(small_graphs, measured_machines, large_batches, budgets)
def test_joint_equals_exhaustive_whatever_was_measured(
    graph: Graph, cluster: Cluster, global_batch: int, budget_bytes: int
) -> None:
    check_equals_exhaustive(graph, cluster, global_batch, budget_bytes)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("prefer_fastest", [False, True])
def test_one_device_is_found_where_kernels_take_long_to_start(kind: str, prefer_fastest: bool) -> None:
    """The whole batch at once: half of it takes as long, and would be sent between two."""
    cluster = machine(1, hosts=2, launch_seconds=0.1, latency_seconds=1.0, kind=kind)
    found = search(chain_graph(4), cluster, PlanRequest(global_batch=32), prefer_fastest=prefer_fastest)
    assert (found.plan.world, found.plan.microbatch) == (1, 32)


def check_equals_exhaustive(graph: Graph, cluster: Cluster, global_batch: int, budget_bytes: int) -> None:
    expected = best_of("exhaustive", graph, cluster, global_batch, budget_bytes)
    found = best_of("joint", graph, cluster, global_batch, budget_bytes)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.estimate.step_seconds == pytest.approx(expected.estimate.step_seconds, rel=1e-9), (
            found.plan,
            expected.plan,
        )
        assert found.gap == 0


@quick
@given(small_graphs, machines, batches)
def test_the_name_of_a_cluster_changes_nothing(graph: Graph, cluster: Cluster, global_batch: int) -> None:
    renamed = msgspec.structs.replace(cluster, name="another")
    one, other = (best_of("joint", graph, found, global_batch, GENEROUS) for found in (cluster, renamed))
    assert one is not None
    assert other is not None
    assert msgspec.structs.replace(one.plan, cluster="") == msgspec.structs.replace(other.plan, cluster="")


def test_within_the_error_the_simpler_plan_is_taken_and_the_faster_one_named() -> None:
    """Sharding the update saves a little time here, less than an estimate can tell."""
    graph, cluster = chain_graph(4, (64, 64)), machine(4, bytes_per_second=1e9, latency_seconds=1e-9)
    request = PlanRequest(global_batch=8)
    fastest = search(graph, cluster, request, prefer_fastest=True)
    chosen = search(graph, cluster, request)
    assert chosen.estimate.step_seconds <= fastest.estimate.step_seconds * 1.05
    assert complexity(chosen.plan) <= complexity(fastest.plan)
    if chosen.plan != fastest.plan:
        assert "--prefer-fastest takes it" in chosen.remark


@pytest.mark.parametrize("fixed", [{"pp": 2}, {"schedule": "zb", "pp": 2}, {"zero": 3, "dp": 4}, {"recompute": "full"}])
def test_what_is_fixed_holds_for_every_costed_plan(fixed: dict[str, Any]) -> None:
    result = search(chain_graph(4), machine(4), PlanRequest(global_batch=8, **fixed))
    for plan in (result.plan, *(other.plan for other in result.runners_up)):
        for name, value in fixed.items():
            if name in ("pp", "dp"):
                assert getattr(plan.mesh, name) == value
            elif name == "recompute":
                assert plan.recomputed("full") == {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}
            else:
                assert getattr(plan, name) == value


def test_uneven_stages_are_found_where_an_end_is_heavier() -> None:
    """A head that works as long as a block: the last stage has one block fewer."""
    graph, cluster = heavy_head(chain_graph(5)), machine(2, latency_seconds=1e-9)
    request = PlanRequest(global_batch=16, pp=2, schedule="1f1b")
    plan = search(graph, cluster, request, world=2, prefer_fastest=True).plan
    assert [len(names) for names in plan.blocks_by_stage] == [3, 3]  # two blocks and the head


def heavy_head(graph: Graph) -> Graph:
    """With one more block behind the others that does not repeat."""
    head = Block(name="head", kind="Block", repeated=False)
    forward = [segment for segment in graph.timeline if segment.number == 0]
    backward = [segment for segment in graph.timeline if segment.number == 1]
    timeline = (*forward, Segment("head", 0), Segment("head", 1), *backward)
    return msgspec.structs.replace(graph, blocks=(*graph.blocks, head), timeline=timeline)
