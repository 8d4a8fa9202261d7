"""What a request fixes stays fixed or is refused, and what the search shows of the plans that lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machines import chain_graph, machine
from test_experts import GRAPH
from transformer import transformer_graph

from meshwright.core.errors import PlanError
from meshwright.core.pipeline.kinds import KINDS
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.cost.communication.links import Group, collective_seconds
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.joint.comparisons import FEWEST
from meshwright.searching.problem import Problem
from meshwright.searching.search import search
from meshwright.searching.space import Point, Shape, worlds


def asked(num_devices: int = 4, num_blocks: int = 8, **fixed: Any) -> SearchResult:
    return search(chain_graph(num_blocks), machine(num_devices), PlanRequest(**fixed))


@pytest.mark.parametrize("schedule", KINDS)
def test_a_schedule_that_is_asked_for_is_the_one_that_is_planned(schedule: str) -> None:
    found = asked(schedule=schedule, pp=2, global_batch=16)
    plans = [found.plan, *(other.plan for other in found.runners_up)]
    assert {plan.schedule for plan in plans} == {schedule}


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"schedule": "dualpipev", "pp": 4, "global_batch": 4}, "needs 8 microbatches or more, got 4"),
        ({"schedule": "dualpipev", "pp": 4, "global_batch": 64, "num_blocks": 6}, "needs 8 stages"),
        ({"schedule": "1f1b", "virtual": 2, "global_batch": 16}, "'1f1b' runs one stage per coordinate, but virtual=2"),
        ({"schedule": "gpipe", "virtual": 3, "pp": 2, "global_batch": 16}, "runs one stage per coordinate"),
        ({"hybrid": 3, "global_batch": 16}, "hybrid=3 does not divide dp=4"),
        ({"ep": 2, "global_batch": 16}, "ep=2, but the model has no experts"),
    ],
)
def test_what_cannot_be_together_is_refused_and_not_left_out(fixed: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        asked(**fixed)


def test_a_ring_needs_no_heads_that_divide() -> None:
    graph = transformer_graph(heads=3, hidden=96, precision="fp32")
    found = search(graph, machine(4), PlanRequest(cp=4, context="ring", global_batch=1, precision="fp32"))
    assert (found.plan.mesh.cp, found.plan.context) == (4, "ring")
    with pytest.raises(PlanError, match="3 attention heads"):
        search(graph, machine(4), PlanRequest(cp=4, context="heads", global_batch=1, precision="fp32"))


@pytest.mark.parametrize("prefer_fastest", [False, True])
def test_there_is_always_something_to_compare_with(prefer_fastest: bool) -> None:
    """The first plan that is costed may leave out all others by its bound; a few are costed all the same, each once."""
    for batch in (1, 7, 64):
        found = search(chain_graph(8), machine(4), PlanRequest(global_batch=batch), prefer_fastest=prefer_fastest)
        plans = [found.plan, *(other.plan for other in found.runners_up)]
        assert len(plans) > FEWEST
        assert len(set(plans)) == len(plans)
        assert msgspec.json.encode(found)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_plans_to_compare_with_are_those_a_search_proposes(num_devices: int) -> None:
    """With few plans all are compared; on a CPU none of them is compiled, fast as that may be by its estimate."""
    gpu = machine(num_devices)
    cpu = msgspec.structs.replace(gpu, device=msgspec.structs.replace(gpu.device, kind="cpu"))
    found = search(chain_graph(2), cpu, PlanRequest(global_batch=1, pp=1, dp=1))
    assert not any(plan.compile for plan in (found.plan, *(other.plan for other in found.runners_up)))
    asked_for = search(chain_graph(2), cpu, PlanRequest(global_batch=1, pp=1, dp=1, compile=True))
    assert asked_for.plan.compile


def test_few_samples_on_many_hosts_take_fewer_devices() -> None:
    cluster = machine(8, hosts=24, outer_bytes_per_second=1e6)
    found = search(chain_graph(2), cluster, PlanRequest(global_batch=1))
    assert found.plan.world <= 8
    plenty = Problem(chain_graph(2), cluster, PlanRequest(global_batch=192))
    assert min(worlds(plenty)) > 96, "a batch that all hosts can share leaves no reason to look at half of them"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_bound_counts_what_ranks_reduce_of_their_experts(zero: Any, ep: int) -> None:
    """Over a link so slow that it is all there is: not less than the reductions take, and no more than what is costed."""
    cluster = machine(4, hosts=2, bytes_per_second=1e6, outer_bytes_per_second=1e4)
    problem = Problem(GRAPH, cluster, PlanRequest(global_batch=8, zero=zero, ep=ep, pp=1, tp=1, cp=1, dp=8))
    shape = Shape(1, 8, 1, 1, ep, sequence_parallel=False, microbatch=1, num_microbatches=1, compile=False)
    point = Point(shape, "1f1b", 1, zero, None, "none")
    drafts = Drafts(problem)
    bounds, room = drafts.bounds(point), drafts.room(point)
    assert bounds is not None
    assert room is not None
    everyone = Group(8 // ep, ep)
    size = 4 * sum(p.num_elements for p in GRAPH.parameters if p.expert) / ep
    alone = collective_seconds("reduce_scatter", size, everyone, cluster)
    compute = bounds.forward_seconds + bounds.backward_seconds
    plan = drafts.plan(point, (len(drafts.units),))
    assert plan is not None
    assert alone - compute <= bounds.of_point(room) <= problem.cost(plan).step_seconds


def test_experts_on_slow_links_go_where_nothing_crosses_them() -> None:
    """As many experts as all ranks together have: each rank its own, and no gradient of them leaves a host."""
    cluster = machine(4, hosts=2, bytes_per_second=1e9, outer_bytes_per_second=1e5)
    found = search(GRAPH, cluster, PlanRequest(global_batch=16), prefer_fastest=True)
    every = [
        search(GRAPH, cluster, PlanRequest(global_batch=16, ep=ep, pp=pp), prefer_fastest=True).estimate.step_seconds
        for ep, pp in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2))
    ]
    assert found.estimate.step_seconds <= min(every) * (1 + 1e-9)
