"""The other searches: each against brute force of its own objective, and all against the exhaustive one."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import OUTPUT, PEAK, chain_graph, machine, named_machine
from strategies import quick
from transformer import transformer_graph

from meshwright.core.errors import InputError, PlanError
from meshwright.core.plan import Mesh
from meshwright.core.request import PlanRequest
from meshwright.rules.limits import not_yet
from meshwright.rules.plain_plan import plain_plan
from meshwright.searching.methods.builder import Builder
from meshwright.searching.methods.exhaustive import count_plans, exhaustive, plans, points
from meshwright.searching.methods.frames import frames
from meshwright.searching.methods.loads import Loads, Unit, loads_of
from meshwright.searching.methods.placement import device_loads, place, placement
from meshwright.searching.methods.policy import Learner, Sample, policy, softmax
from meshwright.searching.methods.profile import (
    Profile,
    free_replication,
    profile,
    replication_loss,
    uniform_replication,
)
from meshwright.searching.problem import Outcome, Problem
from meshwright.searching.search import METHODS, search
from meshwright.searching.space import Point, Shape, Way
from meshwright.searching.units import every_cut, sizes_of


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def compositions(number: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a sum of positive parts, in order."""
    if parts == 1:
        return [(number,)]
    return [(first, *rest) for first in range(1, number) for rest in compositions(number - first, parts - 1)]


def problem_of(num_blocks: int = 3, num_devices: int = 2, **request: Any) -> Problem:
    return Problem(chain_graph(num_blocks, (16, 16)), machine(num_devices), PlanRequest(**request))


def best_of(outcome: Outcome) -> float:
    return min((found.step_seconds for _, found in outcome.costed if found.fits), default=math.inf)


# Exhaustive


def ways_to_recompute(counts: tuple[int, ...]) -> int:
    """Sets of blocks that are the first few of every stage, or every k-th of all: counted over all sets there are."""
    total = sum(counts)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    progressions = [set(range(0, total, stride)) for stride in range(1, total + 1)]

    def counts_as_one(chosen: set[int]) -> bool:
        firsts = all(
            chosen & set(range(start, start + count)) == set(range(start, start + number))
            for start, count in zip(starts, counts, strict=True)
            for number in [len(chosen & set(range(start, start + count)))]
        )
        return firsts or chosen in progressions

    return sum(counts_as_one({b for b in range(total) if mask >> b & 1}) for mask in range(2**total))


def number_of_plans(num_blocks: int, num_devices: int, batch: int) -> int:
    """Of a chain, which no tp and no cp can split, by products rather than by making any."""
    total = 0
    for dp, pp in product(range(1, num_devices + 1), range(1, num_blocks + 1)):
        if dp * pp > num_devices or batch % dp:
            continue
        groups = len(divisors(dp)) - 1  # all of dp, and its divisors but itself and one
        plain, zero_3 = (1 + 2 * groups, groups) if dp > 1 else (1, 0)

        def cut(stages: int) -> int:
            return sum(ways_to_recompute(counts) for counts in compositions(num_blocks, stages))

        if pp == 1:
            choices = 2 * (plain + zero_3) * cut(1)  # compiled or not
        else:
            interleaved = sum(cut(v * pp) for v in range(2, num_blocks // pp + 1))
            choices = 2 * (plain + zero_3) * (2 * cut(pp) + interleaved)  # gpipe, 1f1b
            choices += plain * (
                cut(pp) + (cut(2 * pp) if 2 * pp <= num_blocks else 0)
            )  # zb, zbv: no ZeRO 3, not compiled
        total += choices * len(divisors(batch // dp))
    return total


@pytest.mark.parametrize(
    ("num_blocks", "num_devices", "batch"), [(1, 2, 4), (2, 2, 2), (3, 3, 6), (4, 2, 2), (4, 4, 4)]
)
def test_the_space_has_as_many_plans_as_a_formula_says(num_blocks: int, num_devices: int, batch: int) -> None:
    problem = problem_of(num_blocks, num_devices, global_batch=batch)
    found = list(plans(problem))
    assert len(found) == len(set(found)) == count_plans(problem) == number_of_plans(num_blocks, num_devices, batch)


@pytest.mark.parametrize(
    "fixed",
    [
        {},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"dp": 2, "microbatch": 1, "recompute": "every:2"},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
        {"cp": 2, "zero": 1},
        {"pp": 2, "schedule": "zb", "microbatch": 1},
        {"pp": 2, "schedule": "gpipe", "recompute": "full"},
    ],
)
def test_the_space_has_the_plain_plans(fixed: dict[str, Any]) -> None:
    graph, cluster = transformer_graph(layers=2), named_machine(2)
    wish = PlanRequest(global_batch=2, **fixed)
    world = math.prod(fixed.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    plain = plain_plan(wish, graph, world, cluster.hash)
    assert plain in set(plans(Problem(graph, cluster, PlanRequest(global_batch=2))))
    assert plain in set(plans(Problem(graph, cluster, wish, world=world)))


@pytest.mark.parametrize(
    "fixed",
    [{"dp": 2}, {"zero": 2}, {"pp": 2, "schedule": "interleaved"}, {"virtual": 2}, {"microbatch": 2}, {"hybrid": 2}],
)
def test_what_the_request_fixes_is_fixed_in_every_point(fixed: dict[str, Any]) -> None:
    found = list(points(problem_of(4, 4, global_batch=4, **fixed)))
    assert found
    for point in found:
        for name, value in fixed.items():
            assert getattr(point.shape if name in ("dp", "pp", "microbatch") else point, name) == value


def test_no_plan_of_the_space_is_one_that_cannot_run() -> None:
    problem = Problem(transformer_graph(layers=2), named_machine(2), PlanRequest(global_batch=2))
    assert not any(not_yet(plan) for plan in plans(problem))


def test_cuts_are_all_compositions() -> None:
    for number, parts in product(range(1, 7), range(1, 7)):
        found = sorted(tuple(sizes_of(cut)) for cut in every_cut(number, parts))
        assert found == (compositions(number, parts) if parts <= number else [])
    assert list(every_cut(0, 1)) == [(0,)]


def test_a_space_that_is_too_large_is_refused() -> None:
    with pytest.raises(PlanError, match="costs more than 10 plans: fix more of the plan"):
        exhaustive(problem_of(4, 4, global_batch=4), most_plans=10)


def test_a_deep_model_is_refused_without_making_its_cuts() -> None:
    problem = Problem(chain_graph(48), machine(16), PlanRequest(global_batch=16))
    with pytest.raises(PlanError, match="costs more than 20,000 plans"):
        exhaustive(problem)


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"dp": 2, "global_batch": 3}, "global batch 3 does not divide over dp=2"),
        ({"tp": 2}, "splits no tensor"),
    ],
)
def test_an_empty_space_says_why(fixed: dict[str, Any], said: str) -> None:
    for method in (exhaustive, placement, profile, policy):
        with pytest.raises(PlanError, match=said):
            method(problem_of(**{"global_batch": 2, **fixed}))


# What units cost


def test_units_add_up_to_the_model() -> None:
    problem = problem_of(4, 1, global_batch=6, microbatch=2, recompute="none")
    (frame,) = frames(problem, Builder(problem))
    loads = loads_of(Builder(problem), frame.plain)
    found = problem.cost(Builder(problem).even(frame.plain))
    assert 3 * sum(unit.seconds for unit in loads.units) == pytest.approx(
        found.time_seconds.forward + found.time_seconds.backward
    )
    memory = found.memory_bytes
    assert (
        sum(unit.state_bytes for unit in loads.units) == memory.parameters + memory.gradients + memory.optimizer_state
    )
    kept = sum(unit.kept_bytes for unit in loads.units)
    assert kept + 2 * PEAK == pytest.approx(memory.activations + memory.temporaries)
    assert {unit.sent_bytes for unit in loads.units[:-1]} == {2 * OUTPUT}
    assert loads.fit((4,), 3)


def test_recompute_and_ends_show_in_the_units() -> None:
    problem = Problem(transformer_graph(layers=3), named_machine(2), PlanRequest(global_batch=4, pp=2, microbatch=1))
    builder = Builder(problem)
    (frame,) = frames(problem, builder)
    plain, full = (loads_of(builder, frame.plain, rung.rules).units for rung in (frame.rungs[0], frame.rungs[-1]))
    assert all(
        one.seconds < other.seconds and one.kept_bytes > other.kept_bytes
        for one, other in list(zip(plain, full, strict=True))[1:-1]
    )
    assert plain[-1].kept_bytes > plain[1].kept_bytes  # the head: logits
    assert plain[0].state_bytes > plain[1].state_bytes  # the table
    assert plain[0].send_seconds == plain[1].send_seconds > plain[-1].send_seconds == 0


# Placement

units = st.builds(
    Unit,
    seconds=st.floats(0.1, 3.0),
    send_seconds=st.floats(0.0, 1.0),
    weight_bytes=st.floats(0.0, 10.0),
    state_bytes=st.floats(0.0, 10.0),
    kept_bytes=st.floats(0.0, 3.0),
    sent_bytes=st.floats(0.0, 2.0),
)
chains = st.lists(units, min_size=1, max_size=6).map(tuple)


def has_room(loads: Loads, counts: tuple[int, ...], num_microbatches: int) -> bool:
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    for s, (first, end) in enumerate(pairwise((0, *ends))):
        flight = min(len(counts) - s, num_microbatches)
        held = sum(unit.state_bytes + flight * unit.kept_bytes for unit in loads.units[first:end])
        if held + (flight * loads.units[first - 1].sent_bytes if first else 0.0) > loads.usable_bytes:
            return False
    return True


@quick
@given(chains, st.integers(1, 4), st.integers(1, 4), st.sampled_from([15.0, 25.0, 1e9]))
def test_the_program_finds_the_smallest_largest_load(
    chain: tuple[Unit, ...], num_devices: int, num_microbatches: int, room: float
) -> None:
    loads, busy = Loads(chain, room), [unit.seconds for unit in chain]
    every = compositions(len(chain), num_devices) if num_devices <= len(chain) else []
    with_room, without_doubt = (  # a solver takes what is over by its tolerance
        [
            max(device_loads(loads, busy, one))
            for one in every
            if has_room(Loads(chain, room * share), one, num_microbatches)
        ]
        for share in (1 + 1e-5, 1 - 1e-5)
    )
    answer = place(loads, busy, num_devices, num_microbatches)
    if answer is None:
        assert not without_doubt
        return
    load, counts = answer
    assert load == max(device_loads(loads, busy, counts))
    assert min(with_room) <= load <= 1.002 * min(without_doubt, default=math.inf)


def test_a_load_is_compute_and_what_comes_and_goes() -> None:
    loads = Loads(tuple(Unit(1.0, send, 0.0, 0.0, 0.0) for send in (0.25, 0.5, 0.0)), 1.0)
    assert device_loads(loads, [1.0, 2.0, 4.0], (1, 1, 1)) == [1.5, 3.5, 5.0]
    assert device_loads(loads, [1.0, 2.0, 4.0], (2, 1)) == [4.0, 5.0]


def test_memory_moves_the_cut() -> None:
    """Three light units in memory, one heavy: alone it would share a device, but there is no room for its neighbour."""
    chain = tuple(Unit(1.0, 0.0, 0.0, size, 0.0) for size in (1.0, 1.0, 1.0, 3.0))
    assert place(Loads(chain, 10.0), [1.0] * 4, 2, 1) == (2.0, (2, 2))
    assert place(Loads(chain, 3.0), [1.0] * 4, 2, 1) == (3.0, (3, 1))
    assert place(Loads(chain, 2.0), [1.0] * 4, 2, 1) is None


# Profile


def reduce(num_bytes: float, replicas: int) -> float:
    return 2 * (replicas - 1) / replicas * num_bytes / 5.0


def slowest(found: Profile, stages: list[tuple[int, int]]) -> float:
    """Of stages given by their number of units and replicas, written a second time."""
    worst, first = 0.0, 0
    for count, replicas in stages:
        mine = found.units[first : first + count]
        each = found.total_microbatches / replicas
        own = each * sum(u.seconds for u in mine) + reduce(sum(u.weight_bytes for u in mine), replicas)
        link = each * 2 * found.units[first - 1].send_seconds if first else 0.0
        worst, first = max(worst, own, link), first + count
    return worst


@quick
@given(chains, st.integers(1, 3), st.integers(1, 6))
def test_uniform_replication_equals_brute_force(chain: tuple[Unit, ...], replicas: int, num_stages: int) -> None:
    found = Profile(chain, 6, reduce)
    if num_stages > len(chain):
        return
    seconds, counts = uniform_replication(found, replicas, num_stages)
    every = [slowest(found, [(count, replicas) for count in one]) for one in compositions(len(chain), num_stages)]
    assert seconds == pytest.approx(min(every))
    assert slowest(found, [(count, replicas) for count in counts]) == pytest.approx(seconds)


@quick
@given(chains, st.integers(1, 4))
def test_free_replication_equals_brute_force(chain: tuple[Unit, ...], num_workers: int) -> None:
    found = Profile(chain, 6, reduce)
    seconds, stages = free_replication(found, num_workers)
    every = [
        slowest(found, list(zip(counts, replicas, strict=True)))
        for num_stages in range(1, min(len(chain), num_workers) + 1)
        for counts in compositions(len(chain), num_stages)
        for replicas in product(range(1, num_workers + 1), repeat=num_stages)
        if sum(replicas) <= num_workers
    ]
    assert seconds == pytest.approx(min(every))
    assert slowest(found, list(stages)) == pytest.approx(seconds)
    assert sum(count for count, _ in stages) == len(chain)


def test_one_replication_for_all_stages_costs_something_where_units_differ() -> None:
    """Two light units and a heavy one that wants replicas of its own, which weigh nothing to keep alike."""
    chain = (Unit(1.0, 0.0, 100.0, 0.0, 0.0), Unit(3.0, 0.0, 0.0, 0.0, 0.0))
    found = Profile(chain, 12, reduce)
    assert free_replication(found, 4) == (12.0, ((1, 1), (1, 3)))
    assert min(uniform_replication(found, dp, 4 // dp)[0] for dp in (2, 4)) > 12.0


def test_a_chain_of_like_units_loses_nothing() -> None:
    assert replication_loss(problem_of(4, 4, global_batch=8)) == pytest.approx(0.0, abs=0.05)


# Policy


def test_the_learner_finds_the_best_of_a_tiny_case() -> None:
    """Units of 1, 1, 4 on two devices, or all on one: best is to put the heavy one by itself."""
    weights = (1.0, 1.0, 4.0)

    def reward(sample: Sample) -> float:
        ends = [sum(sample.counts[: stage + 1]) for stage in range(len(sample.counts))]
        loads = [sum(weights[first:end]) for first, end in pairwise((0, *ends))]
        return -math.log(max(loads))

    learner = Learner({(0, 0): 1, (1, 0): 2}, len(weights), seed=3)
    learner.learn(reward, 400)
    draws = [learner.draw() for _ in range(100)]
    assert draws.count(Sample((1, 0), (2, 1))) > 80


def test_a_better_sample_becomes_likelier_and_others_less() -> None:
    learner = Learner({(0,): 2}, 4)
    before = softmax([learner.end_logits[2][0][end] for end in (1, 2, 3)])
    learner.learn(lambda sample: float(sample.counts == (3, 1)), 160)
    after = softmax([learner.end_logits[2][0][end] for end in (1, 2, 3)])
    assert after[2] > before[2]
    assert after[0] < before[0]
    assert after[1] < before[1]


def test_samples_are_legal_cuts() -> None:
    learner = Learner({(pp,): pp for pp in range(1, 6)}, 5)
    for sample in (learner.draw() for _ in range(200)):
        assert len(sample.counts) == sample.setting[0]
        assert sum(sample.counts) == 5
        assert min(sample.counts) >= 1


def test_the_policy_finds_the_best_cut_and_is_the_same_every_time() -> None:
    fixed = {"pp": 2, "dp": 1, "microbatch": 1, "recompute": "none", "schedule": "1f1b"}
    problem = Problem(chain_graph(4, (16, 16)), machine(2), PlanRequest(global_batch=4, **fixed))
    one, other = (policy(problem, num_samples=48) for _ in range(2))
    assert one == other
    assert best_of(one) == best_of(exhaustive(problem))
    assert policy(problem, num_samples=1).num_candidates == 1


# All of them


@pytest.mark.parametrize("budget_bytes", [10**9, 25_000])
@pytest.mark.parametrize(("num_blocks", "num_devices"), [(2, 2), (3, 3)])
def test_no_method_beats_the_exhaustive_one(num_blocks: int, num_devices: int, budget_bytes: int) -> None:
    request = PlanRequest(global_batch=6, microbatch=1)
    problem = Problem(chain_graph(num_blocks, (16, 16)), machine(num_devices), request, budget_bytes=budget_bytes)
    outcome = exhaustive(problem)
    best = best_of(outcome)
    assert outcome.bound_seconds == (best if best < math.inf else None)
    known = {plan for plan, _ in outcome.costed}
    for method in (placement, profile, policy):
        found = method(problem)
        assert {plan for plan, _ in found.costed} <= known
        assert best <= best_of(found)


@pytest.mark.parametrize("name", ["exhaustive", "placement", "profile", "policy"])
def test_a_method_is_reached_by_its_name(name: str) -> None:
    assert name in METHODS
    result = search(chain_graph(2), machine(2), PlanRequest(global_batch=2, microbatch=1), method=name)
    assert result.estimate.fits
    assert result.plan.graph == chain_graph(2).identity


def test_an_unknown_method_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean 'placement'"):
        search(chain_graph(2), machine(2), method="placment")


@pytest.mark.parametrize(("name", "loaded"), [("joint", False), ("placement", True)])
def test_a_comparison_method_is_loaded_only_when_it_is_asked_for(name: str, loaded: bool, tmp_path: Path) -> None:
    graph = chain_graph(2).save(tmp_path / "graph.json")
    cluster = machine(2).save(tmp_path / "cluster.toml")
    code = """if True:
        import sys
        from meshwright.core.cluster import Cluster
        from meshwright.core.graph import Graph
        from meshwright.core.request import PlanRequest
        from meshwright.searching.search import search
        graph, cluster = Graph.load(sys.argv[1]), Cluster.load(sys.argv[2])
        assert search(graph, cluster, PlanRequest(global_batch=2), method=sys.argv[3]).estimate.fits
        print(*(name for name in sys.modules if name.startswith("meshwright.searching.methods")))"""
    command = [sys.executable, "-c", code, str(graph), str(cluster), name]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert (f"meshwright.searching.methods.{name}" in modules) == loaded
    assert bool(modules) == loaded


@pytest.mark.parametrize("method", [placement, profile, policy])
@pytest.mark.parametrize("fixed", [{"schedule": "interleaved"}, {"virtual": 2}])
def test_several_stages_on_a_coordinate_are_refused(method: Any, fixed: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="one stage on each pp coordinate"):
        method(problem_of(global_batch=2, **fixed))


def test_frames_use_all_devices_they_can() -> None:
    problem = problem_of(4, 3, global_batch=8)
    assert {frame.mesh.world for frame in frames(problem, Builder(problem))} == {3}
    odd = problem_of(1, 3, global_batch=8)  # neither three replicas nor three stages
    assert {frame.mesh.world for frame in frames(odd, Builder(odd))} == {2}


def test_a_point_knows_its_microbatches_in_flight() -> None:
    assert Point(Shape.of(Mesh(pp=4), Way(), 1, 8)).in_flight == (4, 3, 2, 1)
    assert Point(Shape.of(Mesh(pp=4), Way(), 1, 2)).in_flight[0] == 2


def test_a_point_knows_its_stages() -> None:
    shape = Shape.of(Mesh(pp=2), Way(), 1, 4)
    assert Point(shape, "interleaved", virtual=3).num_stages == 6
    assert Point(shape, "interleaved", virtual=3).homes == (0, 1, 0, 1, 0, 1)
    assert Point(shape, "zbv", virtual=2).homes == (0, 1, 1, 0)
