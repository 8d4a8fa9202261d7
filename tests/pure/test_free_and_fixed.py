"""Fixing a flag never gives a faster plan than leaving it open, unless the claim says what was not searched."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import machine
from strategies import quick
from test_bounds import clusters, graphs
from transformer import transformer_graph

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.graph import Graph
from meshwright.core.pipeline.kinds import KINDS
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.searching.search import search

ROUNDING = 1e-9
FLAGS: dict[str, list[object]] = {
    "dp": [1, 2, 4],
    "tp": [1, 2],
    "pp": [1, 2],
    "cp": [1, 2],
    "ep": [1, 2],
    "virtual": [1, 2],
    "ends": ["even", "fewer", "own"],
    "zero": [0, 1, 2, 3],
    "hybrid": [2],
    "sequence_parallel": [False, True],
    "context": ["heads", "ring"],
    "microbatch": [1, 2],
    "schedule": list(KINDS),
    "recompute": ["none", "selective", "full", "every:2"],
    "offload": ["none", "optimizer"],
    "compile": [False, True],
}
fixed_flags = st.lists(st.sampled_from(list(FLAGS)), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(FLAGS[name]) for name in names})
)


def best_of(graph: Graph, cluster: Cluster, budget: int | None, **flags: Any) -> SearchResult | None:
    try:
        return search(graph, cluster, PlanRequest(**flags), budget_bytes=budget, prefer_fastest=True)
    except (InfeasibleError, PlanError):
        return None


def check(free: SearchResult | None, fixed: SearchResult | None) -> None:
    if fixed is None:
        return
    assert free is not None, fixed.plan
    faster = fixed.estimate.step_seconds < free.estimate.step_seconds * (1 - ROUNDING)
    assert not (faster and free.complete), (free.plan, fixed.plan)
    if free.gap is not None and not free.claim.left_out:
        assert fixed.estimate.step_seconds * (1 + free.gap) >= free.estimate.step_seconds * (1 - ROUNDING), fixed.plan


@quick
@given(graphs, clusters, st.sampled_from([4, 8]), fixed_flags, st.sampled_from([0.5, 0.8, None]))
def test_a_flag_never_makes_a_plan_faster_than_one_that_is_proven(
    graph: Graph, cluster: Cluster, global_batch: int, flags: dict[str, object], share: float | None
) -> None:
    """share: of what the fastest plan needs."""
    budget = 10**12
    free = best_of(graph, cluster, budget, global_batch=global_batch)
    if share is not None and free is not None:
        budget = round(share * free.estimate.needed_bytes)
        free = best_of(graph, cluster, budget, global_batch=global_batch)
    check(free, best_of(graph, cluster, budget, global_batch=global_batch, **flags))


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("bandwidth", [1e5, 1e7, 1e9])
@pytest.mark.parametrize("heads", [4, 8])
def test_ring_is_costed_beside_heads(cp: int, bandwidth: float, heads: int) -> None:
    graph = transformer_graph(layers=3, heads=heads, seq=64)
    cluster = machine(cp, bytes_per_second=bandwidth)
    flags = {"global_batch": 1, "cp": cp}
    ways = [best_of(graph, cluster, 10**12, context=way, **flags) for way in ("heads", "ring")]
    free = best_of(graph, cluster, 10**12, **flags)
    assert free is not None
    assert free.estimate.step_seconds == pytest.approx(min(way.estimate.step_seconds for way in ways if way))
    assert free.complete


def test_stages_of_unlike_size_are_found_where_both_ends_share_a_coordinate() -> None:
    """zbv: the head works as long as six blocks, and lies where the first blocks do."""
    graph = transformer_graph(layers=24, hidden=32, vocab=32 * 12 * 6 * 2, seq=32)
    cluster = msgspec.structs.replace(machine(4, latency_seconds=1e-9, bytes_per_second=1e15))
    found = best_of(graph, cluster, 10**12, global_batch=16, microbatch=1, pp=4, schedule="zbv")
    assert found is not None
    sizes = [len([name for name in names if name.startswith("blocks.")]) for names in found.plan.blocks_by_stage]
    assert sizes[0] + sizes[-1] < 24 // 4 - 2, "even stages have three blocks each"
