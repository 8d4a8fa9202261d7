"""The joint search against the exhaustive one, and what must hold for every model and machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import chain_graph, machines
from strategies import quick

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError
from meshwright.core.graph import Graph
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.search.search import search

GENEROUS = 10**12
small_graphs = st.integers(1, 4).map(chain_graph)
batches = st.sampled_from([1, 2, 3, 4, 6])
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
    expected = best_of("exhaustive", graph, cluster, global_batch, budget_bytes)
    found = best_of("joint", graph, cluster, global_batch, budget_bytes)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.estimate.step_seconds == pytest.approx(expected.estimate.step_seconds, rel=1e-9), (
            found.plan,
            expected.plan,
        )
        assert found.gap == 0
