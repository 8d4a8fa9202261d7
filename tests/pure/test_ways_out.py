"""Nothing fits: every way out is costed, fits, and is the least of its kind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import chain_graph, flat_plan, machine, named_machine, plan_for
from strategies import quick
from transformer import transformer_graph

from meshwright.core.errors import InfeasibleError
from meshwright.core.estimate import Estimate
from meshwright.core.legal import LegalSharding
from meshwright.core.names import expand_names
from meshwright.core.plan import Plan, Recompute
from meshwright.core.request import PlanRequest
from meshwright.core.result import WayOut
from meshwright.searching.infeasible.suggestions import binding_constraint, ways_out
from meshwright.searching.problem import Problem
from meshwright.searching.search import search

GRAPH = chain_graph(8, (64, 64))


def needed(plan: Plan, problem: Problem) -> int:
    return problem.cost(plan).needed_bytes


def between(low: int, high: int) -> int:
    assert low < high
    return (low + high) // 2


def asked(plan: Plan, budget: int | None, cluster: Any = None, **request: Any) -> tuple[Problem, tuple[WayOut, ...]]:
    """The ways out of a plan that does not fit a budget."""
    problem = Problem(GRAPH, cluster or machine(4), PlanRequest(**request), budget_bytes=budget)
    miss = problem.cost(plan)
    assert not miss.fits
    return problem, ways_out(problem, plan, miss)


def of_kind(ways: tuple[WayOut, ...], words: str) -> WayOut:
    (found,) = (way for way in ways if words in way.words)
    return found


PLAIN = Problem(GRAPH, machine(4))


def test_the_fewest_blocks_are_recomputed() -> None:
    plan = flat_plan(GRAPH, microbatch=32)
    again = flat_plan(GRAPH, microbatch=32, recompute="full")
    budget = between(needed(again, PLAIN), needed(plan, PLAIN))
    problem, ways = asked(plan, budget)
    way = of_kind(ways, "full recompute of")
    names = expand_names(way.plan.recompute[0].blocks)
    assert 0 < len(names) < 8
    assert way.estimate.fits
    assert way.saved_bytes == needed(plan, PLAIN) - way.estimate.needed_bytes
    fewer = names[:-1] if names[0] == "blocks.0" else names[1:]
    rule = (Recompute(mode="full", blocks=fewer),) if fewer else ()
    assert not problem.cost(msgspec.structs.replace(plan, recompute=rule)).fits
    assert way.slower_share == pytest.approx(len(names) / 8 / 3, rel=0.01)  # forward is a third of a step


def test_recompute_adds_to_what_is_there() -> None:
    rules = (Recompute(mode="selective", blocks=("blocks.0-5",)), Recompute(mode="full", blocks=("blocks.6-7",)))
    plan = flat_plan(GRAPH, microbatch=32, recompute=rules)
    again = flat_plan(GRAPH, microbatch=32, recompute="full")
    _, ways = asked(plan, between(needed(again, PLAIN), needed(plan, PLAIN)))
    way = of_kind(ways, "full recompute of")
    assert way.plan.recomputed("full") > {"blocks.6", "blocks.7"}
    assert way.plan.recomputed("full") | way.plan.recomputed("selective") == plan.recomputed("full") | plan.recomputed(
        "selective"
    )


def test_the_largest_microbatch_that_fits() -> None:
    plan = flat_plan(GRAPH, microbatch=96)
    sizes = {size: flat_plan(GRAPH, microbatch=size, num_microbatches=96 // size) for size in (32, 48)}
    problem, ways = asked(plan, between(needed(sizes[32], PLAIN), needed(sizes[48], PLAIN)))
    way = of_kind(ways, "microbatches of")
    assert (way.plan.microbatch, way.plan.num_microbatches) == (32, 3)
    assert not problem.cost(sizes[48]).fits


def test_the_lowest_zero_stage_that_fits() -> None:
    stages = [flat_plan(GRAPH, 4, zero=zero) for zero in (0, 1, 2, 3)]
    problem, ways = asked(stages[0], between(needed(stages[1], PLAIN), needed(stages[0], PLAIN)), zero=0)
    way = of_kind(ways, "ZeRO")
    assert way.plan.zero == 1
    assert way.leave_out == ("--zero",)
    assert way.estimate == problem.cost(stages[1])


def test_one_sharding_group_in_place_of_several() -> None:
    apart, together = flat_plan(GRAPH, 4, zero=3, hybrid=2), flat_plan(GRAPH, 4, zero=3)
    _, ways = asked(apart, between(needed(together, PLAIN), needed(apart, PLAIN)))
    assert of_kind(ways, "not in groups of 2").plan == together


def test_the_fewest_more_hosts() -> None:
    plans = {dp: plan_for(GRAPH, dp=dp, zero=3, microbatch=1, global_batch=64) for dp in (4, 8, 16)}
    large = Problem(GRAPH, machine(4, hosts=8))
    budget = between(needed(plans[16], large), needed(plans[8], large))
    _, ways = asked(plans[4], budget)
    way = of_kind(ways, "more host")
    assert (way.words, way.num_hosts) == ("3 more hosts, with dp 16", 4)
    assert way.plan.mesh.dp == 16
    assert way.plan.global_batch == 64
    assert way.estimate == msgspec.structs.replace(large.cost(plans[16]), budget_bytes=budget)


def test_more_hosts_are_no_way_out_for_a_given_number_of_ranks() -> None:
    plan = plan_for(GRAPH, dp=4, zero=3, microbatch=1, global_batch=64)
    problem = Problem(GRAPH, machine(4), budget_bytes=needed(plan, PLAIN) - 1, world=4)
    assert not any("host" in way.words for way in ways_out(problem, plan, problem.cost(plan)))


def test_the_device_has_more_than_was_given() -> None:
    plan = flat_plan(GRAPH, microbatch=1)
    budget = needed(plan, PLAIN) - 1
    _, ways = asked(plan, budget)
    way = of_kind(ways, "in place of --memory")
    assert (way.saved_bytes, way.slower_share) == (0, 0.0)
    assert way.estimate.budget_bytes == machine(4).device.memory_bytes


def test_offload_is_a_way_out_and_what_cannot_run_comes_last() -> None:
    cluster = named_machine(1)
    problem = Problem(GRAPH, cluster)
    plan, offloaded = plan_for(GRAPH, dp=1), plan_for(GRAPH, dp=1, offload="optimizer")
    budget = between(needed(offloaded, problem), needed(plan, problem))
    _, ways = asked(plan, budget, cluster)
    way = of_kind(ways, "offload optimizer")
    assert way.not_yet == ()
    assert [bool(found.not_yet) for found in ways] == sorted(bool(found.not_yet) for found in ways)


def test_a_host_without_the_memory_needs_more_of_it() -> None:
    plan = plan_for(GRAPH, dp=1)
    for room, more in ((10**12, False), (16, True)):
        cluster = msgspec.structs.replace(named_machine(1), host_memory_bytes=room)
        budget = needed(plan, Problem(GRAPH, cluster)) - 1
        _, ways = asked(plan, budget, cluster)
        way = of_kind(ways, "offload optimizer")
        assert ("1.00 GiB of memory on a host in place of 16 B" in way.words) == more


def test_where_nothing_is_enough_the_nearest_is_named() -> None:
    plan = flat_plan(GRAPH, 4, microbatch=4)
    cluster = machine(4, memory_bytes=64)
    problem, (way,) = asked(plan, None, cluster)
    assert not way.estimate.fits
    assert 0 < way.saved_bytes < problem.cost(plan).needed_bytes


def test_changes_that_only_together_are_enough() -> None:
    plan = flat_plan(GRAPH, 4, microbatch=16)
    every = flat_plan(GRAPH, 4, microbatch=1, num_microbatches=16, zero=3, recompute="full")
    cluster = machine(4, memory_bytes=needed(every, PLAIN))
    problem = Problem(GRAPH, cluster, world=4)
    (way,) = ways_out(problem, plan, problem.cost(plan))
    assert way.words == "full recompute and microbatches of 1 and ZeRO 3"
    assert way.estimate.fits
    assert way.estimate == problem.cost(every)


def test_sequence_parallel_is_offered_where_the_runtime_allows_it() -> None:
    """Its block keeps shards of the stream; a refusal of the runtime is believed."""
    graph = transformer_graph(precision="fp16")
    plain, sharded = (plan_for(graph, tp=2, microbatch=8, sequence_parallel=sp) for sp in (False, True))
    cluster = named_machine(2)
    budget = between(needed(sharded, Problem(graph, cluster)), needed(plain, Problem(graph, cluster)))
    for refusal in ("", "an odd number of tokens"):
        legal = (LegalSharding(tp=2, sequence_parallel=True, sharding=sharded.sharding, refusal=refusal),)
        problem = Problem(graph, cluster, budget_bytes=budget, legal=legal)
        ways = ways_out(problem, plain, problem.cost(plain))
        assert any(way.words == "sequence parallel" for way in ways) == (not refusal)


@quick
@given(st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 4, 8]), st.floats(0.05, 0.95))
def test_every_way_out_is_what_the_cost_model_says(dp: int, zero: int, microbatch: int, share: float) -> None:
    """Each estimate is that of its plan on its cluster; all fit, or there is one; the cheapest comes first."""
    plan = flat_plan(GRAPH, dp, zero=zero, microbatch=microbatch)
    cluster = msgspec.structs.replace(machine(4), host_link=machine(4).intra_host)
    problem = Problem(GRAPH, cluster, budget_bytes=round(share * needed(plan, PLAIN)))
    ways = ways_out(problem, plan, problem.cost(plan))
    assert all(way.estimate.fits for way in ways) or len(ways) == 1
    costs: dict[bool, list[float]] = {True: [], False: []}
    for way in ways:
        larger = msgspec.structs.replace(cluster, num_hosts=way.num_hosts)
        budget = way.estimate.budget_bytes
        assert way.estimate == Problem(GRAPH, larger, budget_bytes=budget).cost(way.plan)
        assert way.plan.global_batch == plan.global_batch
        costs[bool(way.not_yet)].append(way.estimate.step_seconds * larger.num_devices)
    assert all(found == sorted(found) for found in costs.values())


def test_what_binds() -> None:
    plan = flat_plan(GRAPH, microbatch=64)
    miss: Estimate = Problem(GRAPH, machine(4), budget_bytes=1024).cost(plan)
    words = binding_constraint(miss)
    assert words.startswith("memory of rank 0")
    assert "over 1.00 KiB, most of it activations " in words


def test_a_search_that_fails_carries_the_ways_out() -> None:
    with pytest.raises(InfeasibleError) as raised:
        search(
            GRAPH,
            machine(4),
            PlanRequest(global_batch=8, zero=0, recompute="none", microbatch=1, pp=1, tp=1, cp=1),
            budget_bytes=200 * 1024,
        )
    found = raised.value.found
    assert found is not None
    assert not found.estimate.fits
    assert found.ways_out
    assert all(way.estimate.fits for way in found.ways_out)
