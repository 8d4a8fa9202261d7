"""A search that opened too few nodes to find a plan that fits tries the nearest misses, and what it would itself suggest."""

from __future__ import annotations

import pytest
from machines import machine
from test_experts import GRAPH

from meshwright.core.errors import InfeasibleError
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult, WayOut
from meshwright.searching.joint import joint, short_searches
from meshwright.searching.problem import Problem
from meshwright.searching.search import search

CLUSTER = machine(8)
REQUEST = PlanRequest(global_batch=16, offload="none")


def found(budget_bytes: int, request: PlanRequest = REQUEST) -> SearchResult:
    return search(GRAPH, CLUSTER, request, budget_bytes=budget_bytes)


def suggested(budget_bytes: int) -> tuple[WayOut, ...]:
    """Where nothing fits."""
    try:
        assert found(budget_bytes).estimate.fits
    except InfeasibleError as error:
        return error.found.ways_out if error.found is not None else ()
    return ()


@pytest.fixture
def few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as a large space leaves for its first plans."""
    monkeypatch.setattr(short_searches, "FEW_OPENED", 2)
    monkeypatch.setattr(joint, "MOST_OPENED", 1)


def needed_bytes() -> list[int]:
    """Of the plans that a search with all the memory there is costs."""
    result = search(GRAPH, CLUSTER, REQUEST)
    problem = Problem(GRAPH, CLUSTER, REQUEST)
    return sorted(problem.cost(one.plan).needed_bytes for one in (result, *result.runners_up))


@pytest.mark.usefixtures("few_nodes")
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.125, 0.06])
def test_no_suggestion_is_a_plan_that_a_free_search_could_have_found(share: float) -> None:
    budget = round(share * needed_bytes()[0])
    ways = [way for way in suggested(budget) if way.estimate.fits and way.estimate.budget_bytes == budget]
    assert not [way.words for way in ways if not way.leave_out and not way.not_yet and way.num_hosts == 1]


@pytest.mark.usefixtures("few_nodes")
def test_what_fits_under_fixed_flags_is_found_without_them() -> None:
    """The smallest budget that a ZeRO 3 search meets: one that opens hardly a node meets it too."""
    zero3 = PlanRequest(global_batch=16, offload="none", zero=3, recompute="full")
    problem = Problem(GRAPH, CLUSTER, zero3)
    budget = problem.cost(search(GRAPH, CLUSTER, zero3).plan).needed_bytes
    assert found(budget).estimate.fits
