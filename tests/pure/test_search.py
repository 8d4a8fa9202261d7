"""The search against brute force, and what must hold for every model and machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import bandwidths, captured_in, chain_graph, flat_plan, graphs, machine, machines, named_machine
from strategies import quick

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, InputError, PlanError
from meshwright.core.estimate import TimeParts
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.core.units import format_bytes
from meshwright.cost.estimate import estimate
from meshwright.searching.problem import SAMPLES_PER_DEVICE
from meshwright.searching.reasons import WORDS, reason_lost
from meshwright.searching.search import search

GENEROUS = 10**12

batches = st.integers(1, 12)
budgets = st.integers(1, 200_000)


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def every_plan(graph: Graph, num_devices: int, global_batch: int) -> Iterator[Plan]:
    """All data-parallel plans, written a second time."""
    for dp in range(1, num_devices + 1):
        if global_batch % dp == 0:
            share = global_batch // dp
            for microbatch in divisors(share):
                for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                    for recompute in ((), "full"):
                        yield flat_plan(
                            graph,
                            dp,
                            microbatch=microbatch,
                            num_microbatches=share // microbatch,
                            zero=zero,
                            recompute=recompute,
                        )


def best_seconds(graph: Graph, cluster: Cluster, budget_bytes: int, **request: Any) -> float:
    """The step of the fastest plan; infinite where none fits."""
    try:
        found = search(graph, cluster, PlanRequest(**request), budget_bytes=budget_bytes, prefer_fastest=True)
        return found.estimate.step_seconds
    except InfeasibleError:
        return math.inf


@quick
@given(graphs, machines, batches, budgets, budgets)
def test_more_memory_never_makes_the_best_plan_slower(
    graph: Graph, cluster: Cluster, global_batch: int, one: int, other: int
) -> None:
    less, more = sorted((one, other))
    slow, fast = (best_seconds(graph, cluster, budget, global_batch=global_batch) for budget in (less, more))
    assert fast <= slow * (1 + 1e-8)


@quick
@given(graphs, st.sampled_from([2, 4]), batches, budgets, bandwidths, bandwidths, st.floats(0, 1))
def test_a_faster_link_never_makes_the_best_plan_slower(
    graph: Graph, num_devices: int, global_batch: int, budget_bytes: int, one: float, other: float, overlap: float
) -> None:
    slow, fast = (
        best_seconds(
            graph,
            machine(num_devices, bytes_per_second=speed, overlap_share=overlap),
            budget_bytes,
            global_batch=global_batch,
        )
        for speed in sorted((one, other))
    )
    assert fast <= slow * (1 + 1e-8)


@quick
@given(graphs, batches)
def test_more_devices_never_make_the_best_plan_slower(graph: Graph, global_batch: int) -> None:
    few, many = (best_seconds(graph, machine(n), GENEROUS, global_batch=global_batch) for n in (2, 4))
    assert many <= few


def without_clock(result: SearchResult) -> SearchResult:
    return msgspec.structs.replace(result, search_seconds=0.0)


@quick
@given(graphs, machines, batches)
def test_the_same_input_gives_the_same_plan(graph: Graph, cluster: Cluster, global_batch: int) -> None:
    request = PlanRequest(global_batch=global_batch)
    copies = Graph.from_json(graph.to_json()), Cluster.from_toml(cluster.to_toml())
    assert without_clock(search(graph, cluster, request)) == without_clock(search(*copies, request))


@quick
@given(graphs, machines, batches)
def test_a_result_can_be_trusted_and_survives_its_file(graph: Graph, cluster: Cluster, global_batch: int) -> None:
    result = search(graph, cluster, PlanRequest(global_batch=global_batch))
    assert result.estimate == estimate(graph, result.plan, cluster)
    assert (result.plan.graph, result.plan.cluster) == (graph.identity, cluster.hash)
    assert result.plan.global_batch == global_batch
    assert SearchResult.from_json(result.to_json()) == result


@quick
@given(graphs, machines, batches, budgets)
def test_runners_up_come_best_first_and_those_that_do_not_fit_last(
    graph: Graph, cluster: Cluster, global_batch: int, budget_bytes: int
) -> None:
    try:
        result = search(graph, cluster, PlanRequest(global_batch=global_batch), budget_bytes=budget_bytes)
    except InfeasibleError:
        return
    fitting = [other for other in result.runners_up if other.fits]
    missing = [other for other in result.runners_up if not other.fits]
    assert (*fitting, *missing) == result.runners_up
    by_mesh: dict[object, list[float]] = {}
    for other in fitting:
        by_mesh.setdefault(other.plan.mesh, []).append(other.step_seconds)
    for times in by_mesh.values():
        assert all(one <= other * (1 + 1e-8) for one, other in pairwise(times))
    for other in missing:
        over = format_bytes(other.peak_bytes - budget_bytes)
        assert other.reason.startswith(f"{over} over the budget of {format_bytes(budget_bytes)}")


# The choice


def test_compute_alone_is_spread_over_all_devices() -> None:
    plan = search(chain_graph(4, (8, 8)), machine(4, bytes_per_second=1e12, latency_seconds=1e-12)).plan
    assert (plan.mesh.dp, plan.num_microbatches, plan.recompute) == (4, 1, ())
    assert plan.global_batch == 4 * SAMPLES_PER_DEVICE


def test_a_link_that_is_too_slow_is_not_used() -> None:
    assert search(chain_graph(), machine(4, bytes_per_second=1.0)).plan.mesh.dp == 1


def test_a_tight_budget_is_met_by_sharding_and_recompute() -> None:
    graph, cluster = chain_graph(4, (64, 64)), machine(4, latency_seconds=1e-9)
    plain = search(graph, cluster, PlanRequest(global_batch=4, zero=0, recompute="none"))
    result = search(graph, cluster, PlanRequest(global_batch=4), budget_bytes=plain.estimate.peak_bytes // 2)
    assert result.plan.zero > 0
    assert result.estimate.fits


def test_among_equals_the_plainer_plan_wins() -> None:
    """Without parameters nothing is sent or updated in bulk: microbatches and ZeRO change nothing but their number."""
    graph = msgspec.structs.replace(chain_graph(), parameters=())
    result = search(graph, machine(1), PlanRequest(global_batch=4, recompute="none"))
    assert result.plan.num_microbatches == 1
    assert {other.reason for other in result.runners_up} == {"equally fast, less plain"}


def test_rounding_does_not_decide_between_equals() -> None:
    graph = msgspec.structs.replace(chain_graph(), parameters=())
    result = search(graph, machine(1), PlanRequest(global_batch=31, recompute="none"))
    assert result.plan.num_microbatches == 1


def test_a_fixed_microbatch_leaves_the_degrees_it_divides() -> None:
    result = search(chain_graph(), machine(4), PlanRequest(global_batch=8, microbatch=4))
    assert result.plan.mesh.dp in (1, 2)


@pytest.mark.parametrize(
    "fixed",
    [
        {"dp": 2},
        {"zero": 2},
        {"microbatch": 2, "dp": 2},
        {"recompute": "full"},
        {"recompute": "every:2"},
        {"precision": "bf16"},
    ],
)
def test_what_the_request_fixes_is_kept(fixed: dict[str, Any]) -> None:
    graph = captured_in(fixed.get("precision", "fp32"), chain_graph())
    result = search(graph, machine(4), PlanRequest(global_batch=8, **fixed))
    for plan in (result.plan, *(other.plan for other in result.runners_up)):
        for name, value in fixed.items():
            if name == "dp":
                assert plan.mesh.dp == value
            elif name == "recompute":
                assert plan.recomputed("full") == set(graph.repeated_blocks[:: 2 if "every" in value else 1])
            else:
                assert getattr(plan, name) == value


def test_world_fixes_the_number_of_ranks() -> None:
    result = search(chain_graph(), machine(4, bytes_per_second=1.0), world=2)
    assert {result.plan.world, *(other.plan.world for other in result.runners_up)} == {2}


def test_the_recipe_counts() -> None:
    graph = chain_graph(4, (64, 64))
    adam, plain = (
        search(
            graph, machine(1), recipe=Recipe(optimizer_slots=slots, optimizer_scalar_bytes=0)
        ).estimate.memory_bytes.optimizer_state
        for slots in (2, 0)
    )
    assert (adam, plain) == (2 * 4 * graph.num_parameters, 0)


# What cannot be met


def test_an_infeasible_budget_names_the_nearest_miss_and_the_amount() -> None:
    graph, cluster = chain_graph(4, (64, 64)), machine(4)
    with pytest.raises(InfeasibleError) as caught:
        search(graph, cluster, PlanRequest(global_batch=8), budget_bytes=2048)
    found = caught.value.found
    assert found is not None
    assert not found.estimate.fits
    over = found.estimate.needed_bytes - 2048
    assert f"needs {format_bytes(found.estimate.needed_bytes)}, {format_bytes(over)} too much, most of it" in str(
        caught.value
    )
    enough = search(graph, cluster, PlanRequest(global_batch=8), budget_bytes=found.estimate.needed_bytes)
    assert enough.estimate.fits


def test_the_memory_of_the_device_is_the_budget() -> None:
    with pytest.raises(InfeasibleError, match=r"fits 1.95 KiB per device on 2 × round"):
        search(chain_graph(), machine(2, memory_bytes=2000))


def test_parameters_that_need_several_devices_do_not_stop_the_search() -> None:
    """Those of 16 KiB fit on no single device of 14 KiB, a candidate; sharded over 8 they do."""
    graph = chain_graph(16, (64, 4))
    assert search(graph, machine(8, memory_bytes=14 * 1024), PlanRequest(global_batch=8)).plan.mesh.dp == 8


@pytest.mark.parametrize(
    ("request_fields", "world", "said"),
    [
        ({"global_batch": 7, "pp": 1}, 4, "global batch 7 does not divide over dp=4 ranks: use 4 or 8"),
        ({"global_batch": 7, "dp": 2}, None, "global batch 7 does not divide over dp=2 ranks: use 6 or 8"),
        (
            {"global_batch": 8, "microbatch": 3},
            4,
            "each of 4 ranks has 2 samples .* do not divide into microbatches of 3: use 2",
        ),
        ({"dp": 8}, None, "dp=8 needs 8 ranks, but there are 4: lower a degree or use more devices"),
        ({"dp": 2, "tp": 1, "pp": 1, "cp": 1}, 4, "dp=2 .* needs 2 ranks, but there are 4: make them equal"),
        ({}, 8, "8 ranks were asked for, but 'machine' has 4 devices"),
        ({"tp": 2}, None, "tp=2 but splits no tensor"),
        ({"zero": 0, "hybrid": 2, "dp": 2}, None, "hybrid=2 without ZeRO: set zero to 1, 2 or 3"),
        ({"zero": 3, "hybrid": 3, "dp": 4}, None, "hybrid=3 does not divide dp=4"),
        ({"sequence_parallel": True}, None, "sequence parallel shards tokens over tp, but tp=1"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(request_fields: dict[str, Any], world: int | None, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        search(chain_graph(), machine(4), PlanRequest(**request_fields), world=world)


def test_offload_needs_a_figure_for_the_link_to_the_host() -> None:
    with pytest.raises(InputError, match="no figure for the link between device and host"):
        search(chain_graph(), machine(4), PlanRequest(offload="optimizer"))


def test_a_precision_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="no bf16 rate"):
        search(captured_in("bf16", chain_graph()), Cluster.named("v100-16g-p3"))


# Reasons


def test_a_reason_names_the_part_that_costs_most() -> None:
    graph, cluster = chain_graph(), machine(1)
    best, again = (estimate(graph, flat_plan(graph, microbatch=8, recompute=r), cluster) for r in ((), "full"))
    assert reason_lost(again, best) == "+33.3% time: +32.0 ms for recompute"
    slow = machine(4, bytes_per_second=1e4)
    sent = estimate(graph, flat_plan(graph, 4, microbatch=2), slow)
    assert reason_lost(sent, best).endswith("for communication in backward")


@pytest.mark.parametrize("part", list(TimeParts.__struct_fields__))
def test_every_part_of_a_step_can_be_the_reason(part: str) -> None:
    graph = chain_graph()
    best = estimate(graph, flat_plan(graph), machine(1))
    parts = msgspec.structs.replace(best.time_seconds, **{part: getattr(best.time_seconds, part) + 1.0})
    lost = msgspec.structs.replace(best, time_seconds=parts, step_seconds=parts.total)
    assert reason_lost(lost, best).endswith(f"+1.00 s for {WORDS[part]}")


def test_what_the_driver_holds_counts_as_over_the_budget() -> None:
    """The peak alone fits; with the allocator's slack and the driver's context it does not."""
    graph = captured_in("fp16", chain_graph())
    cluster = named_machine(1, context_bytes=4096.0, allocator_slack_share=0.0)
    best = estimate(graph, flat_plan(graph), cluster)
    lost = estimate(graph, flat_plan(graph), cluster, budget_bytes=best.peak_bytes)
    assert not lost.fits
    said = f"4.00 KiB over the budget of {format_bytes(best.peak_bytes)} in the backward of blocks.3"
    assert reason_lost(lost, best) == said
    with pytest.raises(InfeasibleError, match=r"KiB too much"):
        search(graph, cluster, PlanRequest(global_batch=1), budget_bytes=best.peak_bytes - 4096)
