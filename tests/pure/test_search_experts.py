"""The search over experts' degrees: those that do not divide them are left out, and do not end it."""

from __future__ import annotations

import pytest
from machines import machine
from test_experts import GRAPH

from meshwright.core.errors import PlanError
from meshwright.core.request import PlanRequest
from meshwright.searching.search import search


def test_degrees_that_do_not_divide_the_experts_are_left_out() -> None:
    """32 experts on 6 devices: ep is 1 or 2, never 3 or 6."""
    found = search(GRAPH, machine(6), PlanRequest(global_batch=12))
    plans = [found.plan, *(other.plan for other in found.runners_up)]
    assert {plan.mesh.ep for plan in plans} <= {1, 2}
    with pytest.raises(PlanError, match="32 experts do not divide over ep=3"):
        search(GRAPH, machine(6), PlanRequest(global_batch=12, ep=3))
