"""Meshes near the best ones: what a flag finds next to them, a search that is cut short finds too."""

from __future__ import annotations

import pytest
from machines import machine
from transformer import transformer_graph

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.joint.near_meshes import NearMeshes
from meshwright.searching.problem import Problem
from meshwright.searching.search import search

GRAPH = transformer_graph(layers=16, hidden=64, vocab=2048, seq=64)


def near(graph: Graph, cluster: Cluster, known: SearchResult, world: int | None) -> float:
    """Seconds of the best plan that is found from one."""
    problem = Problem(graph, cluster, PlanRequest(global_batch=8), world=world, prefer_fastest=True)
    costed = NearMeshes(problem, Drafts(problem), [(known.plan, known.estimate)]).go_on()
    assert costed[0] == (known.plan, known.estimate)
    return min(estimate.step_seconds for _, estimate in costed if estimate.fits)


@pytest.mark.parametrize("bandwidth", [1e8, 1e10])
def test_from_eight_stages_what_other_degrees_give_is_found(bandwidth: float) -> None:
    cluster = machine(8, latency_seconds=1e-6, bytes_per_second=bandwidth)
    degrees = [(8, 1, 1), (4, 1, 2), (4, 2, 1), (2, 2, 2), (2, 1, 4), (1, 2, 4), (1, 4, 2), (1, 1, 1)]
    fixed = [
        search(GRAPH, cluster, PlanRequest(global_batch=8, pp=pp, cp=cp, tp=tp), prefer_fastest=True, world=8)
        for pp, cp, tp in degrees
    ]
    found = near(GRAPH, cluster, fixed[0], world=8)
    for one in fixed:
        assert found <= one.estimate.step_seconds * (1 + 1e-9), one.plan


def test_fewer_devices_are_found_where_links_are_slow() -> None:
    cluster = machine(8, latency_seconds=1e-3, bytes_per_second=1e6)
    all_of_them, alone = (
        search(GRAPH, cluster, PlanRequest(global_batch=8, dp=dp, pp=1, tp=1, cp=1), prefer_fastest=True)
        for dp in (8, 1)
    )
    assert near(GRAPH, cluster, all_of_them, world=None) <= alone.estimate.step_seconds * (1 + 1e-9)
    assert alone.estimate.step_seconds < all_of_them.estimate.step_seconds
