"""The cost model against figures worked out by hand. Ψ: parameters, N: ranks, m: microbatches; all state is fp32."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import (
    DEVICE,
    KEPT,
    OUTPUT,
    PEAK,
    bandwidths,
    captured_in,
    chain_graph,
    flat_plan,
    graphs,
    machine,
    machines,
)
from strategies import degrees, divisors, quick

from meshwright.core.cluster import Cluster, CollectiveTime
from meshwright.core.errors import InputError, PlanError
from meshwright.core.estimate import MemoryParts
from meshwright.core.graph import Graph, Parameter
from meshwright.core.plan import Mesh, Offload, Plan, Recompute, Stage
from meshwright.core.recipe import Recipe
from meshwright.cost.communication import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    bucket_bytes,
    calls,
    collective_seconds,
    ring_link,
    ring_seconds,
)
from meshwright.cost.compute import ComputeCost, kernel_seconds, rate_points, update_seconds
from meshwright.cost.estimate import estimate, exposed_seconds
from meshwright.cost.memory import moments
from meshwright.cost.state import groups_of, shard_elements, total_elements

ADAM = Recipe(optimizer_slots=2, optimizer_scalar_bytes=0)
"""The textbook's Adam: two tensors, its step counts left out."""
PSI = 4 * 64 * 8
"""Parameters of `chain_graph(4, (64, 8))`, which every power of two up to 64 divides."""

plans_of = st.builds(
    lambda graph, dp, zero, m, size, recompute: (
        graph,
        flat_plan(graph, dp, zero=zero, num_microbatches=m, microbatch=size, recompute=recompute),
    ),
    graphs,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2, 3]),
    degrees,
    degrees,
    st.sampled_from([(), "full"]),
)


# State


@quick
@given(st.lists(st.integers(1, 50), min_size=1, max_size=3).map(tuple), st.integers(1, 16))
def test_shards_sum_to_the_whole_and_the_last_is_padded(shape: tuple[int, ...], num_ranks: int) -> None:
    parameter = Parameter(name="w", shape=shape, dtype="float32")
    row = parameter.num_elements // shape[0]
    held = [
        min(shard_elements(parameter, num_ranks), parameter.num_elements - first)
        for first in _starts(parameter, num_ranks)
    ]
    assert sum(held) == parameter.num_elements
    assert shard_elements(parameter, num_ranks) == row * -(-shape[0] // num_ranks)


def _starts(parameter: Parameter, num_ranks: int) -> list[int]:
    size = shard_elements(parameter, num_ranks)
    return [rank * size for rank in range(num_ranks) if rank * size < parameter.num_elements]


@pytest.mark.parametrize(
    ("shape", "num_ranks", "elements"),
    [((8, 3), 4, 6), ((5, 3), 4, 6), ((2, 3), 4, 3), ((7,), 2, 4), ((), 4, 1), ((5, 3), 1, 15), ((0, 3), 2, 0)],
)
def test_the_padded_shard(shape: tuple[int, ...], num_ranks: int, elements: int) -> None:
    assert shard_elements(Parameter(name="w", shape=shape, dtype="float32"), num_ranks) == elements


def end_of_backward(graph: Graph, plan: Plan, recipe: Recipe = ADAM) -> MemoryParts:
    """Memory in the last segment of the last microbatch's backward, when all gradients exist."""
    *_, last, _update = moments(graph, plan, recipe, DEVICE)
    return last


def state_bytes(parts: MemoryParts) -> int:
    return parts.parameters + parts.gradients + parts.optimizer_state + parts.gathered_parameters


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
@pytest.mark.parametrize(
    ("zero", "precision", "whole", "shared"),
    [  # bytes per parameter: held whole, and split over the ranks
        (0, "fp32", 4 + 4 + 8, 0),
        (0, "bf16", 4 + 4 + 8, 0),
        (1, "fp32", 4 + 4, 4 + 8),
        (1, "bf16", 2 + 4, 4 + 8),
        (2, "fp32", 4, 4 + 4 + 8),
        (2, "bf16", 2, 4 + 4 + 8),
    ],
)
def test_zero_splits_the_state(zero: int, precision: str, whole: int, shared: int, num_ranks: int) -> None:
    plan = flat_plan(chain_graph(4, (64, 8)), num_ranks, zero=zero, precision=precision, num_microbatches=2)
    parts = end_of_backward(chain_graph(4, (64, 8)), plan)
    assert state_bytes(parts) == whole * PSI + shared * PSI // num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_zero_3_splits_everything_but_the_blocks_at_work(num_ranks: int) -> None:
    graph = chain_graph(4, (64, 8))
    found = list(moments(graph, flat_plan(graph, num_ranks, zero=3, num_microbatches=2), ADAM, DEVICE))
    block = 4 * 64 * 8
    assert [parts.gathered_parameters for parts in found[:4]] == [block] * 4
    assert [parts.gathered_parameters for parts in found[4:8]] == [2 * block] * 3 + [block]  # backward gathers ahead
    assert {state_bytes(parts) - parts.gathered_parameters for parts in found} == {16 * PSI // num_ranks}


def test_the_known_point_of_the_zero_paper() -> None:
    """Ψ = 7.5e9, N = 64: 120, 31.4, 16.6 and 1.9 GB with 16-bit gradients; ours are fp32, 2 bytes more each."""
    graph, psi, num_ranks = chain_graph(10, (64, 11_718_750)), 7.5e9, 64
    plans = [flat_plan(graph, num_ranks, zero=zero, precision="bf16", num_microbatches=2) for zero in (0, 1, 2, 3)]
    found = [end_of_backward(graph, plan) for plan in plans]
    assert state_bytes(found[0]) / 1e9 == pytest.approx(120)
    assert (state_bytes(found[1]) - 2 * psi) / 1e9 == pytest.approx(31.4, abs=0.05)
    assert (state_bytes(found[2]) - 2 * psi / num_ranks) / 1e9 == pytest.approx(16.6, abs=0.05)
    assert (state_bytes(found[3]) - found[3].gathered_parameters) / 1e9 == pytest.approx(1.9, abs=0.05)


@pytest.mark.parametrize(("slots", "bytes_per_parameter"), [(0, 0), (1, 4), (2, 8)])
def test_the_optimizer_decides_its_state(slots: int, bytes_per_parameter: int) -> None:
    graph = chain_graph(4, (64, 8))
    parts = end_of_backward(graph, flat_plan(graph, 4, zero=1), Recipe(optimizer_slots=slots, optimizer_scalar_bytes=0))
    assert parts.optimizer_state == bytes_per_parameter * PSI // 4


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_each_rank_keeps_a_scalar_for_each_trained_tensor(num_ranks: int) -> None:
    graph = frozen(chain_graph(4, (64, 8)))
    plan = flat_plan(graph, num_ranks, zero=1)
    with_scalars, without = (
        end_of_backward(graph, plan, Recipe(optimizer_scalar_bytes=size)).optimizer_state for size in (4, 0)
    )
    assert with_scalars - without == 3 * 4


def test_fp64_state_is_twice_as_large() -> None:
    graph = chain_graph(4, (64, 8))
    assert state_bytes(end_of_backward(graph, flat_plan(graph, 2, zero=2, precision="fp64"))) == 8 * PSI + 32 * PSI // 2


def frozen(graph: Graph) -> Graph:
    first, *others = graph.parameters
    return msgspec.structs.replace(graph, parameters=(msgspec.structs.replace(first, trainable=False), *others))


@pytest.mark.parametrize("zero", [0, 2])
def test_a_frozen_parameter_has_no_gradient_and_no_optimizer_state(zero: int) -> None:
    graph = frozen(chain_graph(4, (64, 8)))
    parts = end_of_backward(graph, flat_plan(graph, 2, zero=zero))
    share = 2 if zero else 1
    assert parts.parameters == 4 * PSI // share
    assert parts.gradients == 4 * (PSI - 512) // share
    assert parts.optimizer_state == 8 * (PSI - 512) // share
    reduced = sum(
        call.num_bytes
        for call in calls(graph, flat_plan(graph, 2, zero=zero), ADAM)
        if "reduce" in call.kind and call.phase == "backward"
    )
    assert reduced == 4 * (PSI - 512)


# Activations


def test_activations_pile_up_in_forward() -> None:
    graph, n = chain_graph(4), 3
    found = list(moments(graph, flat_plan(graph, microbatch=n), ADAM, DEVICE))
    assert [parts.activations for parts in found[:-1]] == [n * KEPT * live for live in (0, 1, 2, 3, 4, 3, 2, 1)]
    assert {parts.temporaries for parts in found[:-1]} == {n * PEAK}


def test_a_recomputed_block_keeps_its_output_and_rebuilds_the_rest() -> None:
    graph, n = chain_graph(4), 3
    found = list(moments(graph, flat_plan(graph, microbatch=n, recompute="full"), ADAM, DEVICE))
    assert [parts.activations for parts in found[:-1]] == [n * OUTPUT * live for live in (0, 1, 2, 3, 4, 3, 2, 1)]
    assert {parts.temporaries for parts in found[4:8]} == {n * (KEPT - OUTPUT + PEAK)}


def test_a_plan_in_another_precision_than_the_capture_is_refused() -> None:
    graph = chain_graph(4)
    with pytest.raises(PlanError, match="the plan computes in bf16, but the graph was captured in fp32"):
        estimate(graph, flat_plan(graph, precision="bf16"), machine(1))


def test_the_batch_of_all_microbatches_is_held() -> None:
    graph = chain_graph(4)
    assert end_of_backward(graph, flat_plan(graph, microbatch=2, num_microbatches=3)).inputs == 6 * 64


@pytest.mark.parametrize(("kind", "room"), [("cuda", 4 * PSI // 2), ("cpu", 2 * 4 * 512 // 2)])
def test_the_update_is_a_moment_too(kind: str, room: int) -> None:
    graph = chain_graph(4, (64, 8))
    device = msgspec.structs.replace(DEVICE, kind=kind)
    *_, update = moments(graph, flat_plan(graph, 2, zero=1), ADAM, device)
    assert (update.temporaries, update.activations, update.gathered_parameters) == (room, 0, 0)


@quick
@given(plans_of, machines)
def test_memory_parts_add_up_to_the_largest_moment(case: tuple[Graph, Plan], cluster: Cluster) -> None:
    graph, plan = case
    found = estimate(graph, plan, machine(4, kind=cluster.device.kind))
    assert found.peak_bytes == found.memory_bytes.total
    assert found.peak_bytes == max(parts.total for parts in moments(graph, plan, Recipe(), cluster.device))
    assert min(msgspec.structs.astuple(found.memory_bytes)) >= 0


@quick
@given(graphs, st.sampled_from([1, 2, 3]), degrees)
def test_more_ranks_never_hold_more_state(graph: Graph, zero: int, num_microbatches: int) -> None:
    held = []
    for num_ranks in (1, 2, 4, 8):
        parts = end_of_backward(graph, flat_plan(graph, num_ranks, zero=zero, num_microbatches=num_microbatches))
        held.append(parts.parameters + parts.gradients + parts.optimizer_state)
    assert held == sorted(held, reverse=True)


def test_recompute_needs_less_memory_and_a_third_more_compute() -> None:
    graph = chain_graph(8)
    plain, again = (estimate(graph, flat_plan(graph, microbatch=64, recompute=r), machine(1)) for r in ((), "full"))
    assert again.peak_bytes < plain.peak_bytes
    assert again.time_seconds.recompute == plain.time_seconds.forward
    compute = plain.time_seconds.forward + plain.time_seconds.backward
    assert again.time_seconds.recompute / compute == pytest.approx(1 / 3)


# Communication


@quick
@given(st.integers(2, 64), st.integers(0, 10**9), bandwidths)
def test_a_ring_all_reduce(num_ranks: int, num_bytes: int, bandwidth: float) -> None:
    """Each rank sends 2 (N-1)/N · M, in 2 (N-1) hops; it is a reduce-scatter and an all-gather of the shards."""
    cluster = machine(64, bytes_per_second=bandwidth, latency_seconds=1e-6)
    hops = num_ranks - 1
    found = ring_seconds("all_reduce", num_bytes, num_ranks, cluster)
    assert found == pytest.approx(2 * hops * 1e-6 + 2 * hops / num_ranks * num_bytes / bandwidth)
    halves = (
        ring_seconds("reduce_scatter", num_bytes * num_ranks, num_ranks, cluster),
        ring_seconds("all_gather", num_bytes, num_ranks, cluster),
    )
    assert sum(halves) == pytest.approx(ring_seconds("all_reduce", num_bytes * num_ranks, num_ranks, cluster))


def moved_values(graph: Graph, plan: Plan) -> float:
    """Values each rank sends in a step, counted as N/(N-1) of what a ring sends: the ZeRO paper's count."""
    item = {"all_gather": 2 if plan.precision == "bf16" else 4}
    times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": plan.mesh.dp}
    return sum(
        call.count * times[call.kind] * call.num_bytes / item.get(call.kind, 4)
        for call in calls(graph, plan, ADAM)
        if call.phase != "other"
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 4, 64])
@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_of_a_step(zero: int, passes: int, num_ranks: int, precision: str) -> None:
    graph = chain_graph(4, (64, 8))
    assert moved_values(graph, flat_plan(graph, num_ranks, zero=zero, precision=precision)) == passes * PSI


@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 1 + 3), (3, 3 * 3)])
def test_traffic_of_three_microbatches(zero: int, passes: int) -> None:
    graph = chain_graph(4, (64, 8))
    assert moved_values(graph, flat_plan(graph, 4, zero=zero, num_microbatches=3)) == passes * PSI


def test_what_lies_outside_the_blocks_stays_gathered_from_forward_to_backward() -> None:
    graph = chain_graph(4, (64, 8), outside=(64, 100))
    assert moved_values(graph, flat_plan(graph, 4, zero=3)) == 3 * PSI + 2 * 6400


def test_padding_travels_too() -> None:
    graph = chain_graph(1, (5, 3))
    (gather, reduce) = (c for c in calls(graph, flat_plan(graph, 4, zero=2), ADAM) if c.phase != "other")
    assert (gather.kind, gather.num_bytes) == ("all_gather", 2 * 3 * 4)
    assert (reduce.kind, reduce.num_bytes) == ("reduce_scatter", 4 * 2 * 3 * 4)


def test_one_device_calls_nothing() -> None:
    graph = chain_graph()
    found = estimate(graph, flat_plan(graph), machine(1))
    assert found.collectives == ()
    assert (found.time_seconds.exposed_gather, found.time_seconds.exposed_reduce, found.time_seconds.other) == (0, 0, 0)


def test_clipping_adds_one_small_all_reduce_where_gradients_are_sharded() -> None:
    graph = chain_graph()
    for zero, more in ((0, 0), (1, 1)):
        plan = flat_plan(graph, 2, zero=zero)
        assert len(calls(graph, plan, Recipe(clips=True))) - len(calls(graph, plan, Recipe())) == more


@quick
@given(st.lists(st.integers(1, 2**24), max_size=12))
def test_buckets_hold_every_gradient_and_close_when_full(sizes: list[int]) -> None:
    parameters = [Parameter(name=f"w{i}", shape=(size,), dtype="float32") for i, size in enumerate(sizes)]
    buckets = bucket_bytes(parameters, item_bytes=4)
    assert sum(buckets) == 4 * sum(sizes)
    for place, size in enumerate(buckets[:-1]):
        assert size >= (BUCKET_BYTES if place else FIRST_BUCKET_BYTES)


@pytest.mark.parametrize("order", [(), ("w2", "w1", "w0")])
def test_buckets_fill_as_gradients_become_ready(order: tuple[str, ...]) -> None:
    """From the last parameter to the first, where the capture does not say otherwise."""
    sizes = [3, 2**21, 2**18]  # 12 B, 8 MiB, 1 MiB
    parameters = tuple(Parameter(name=f"w{i}", shape=(size,), dtype="float32") for i, size in enumerate(sizes))
    graph = msgspec.structs.replace(chain_graph(), parameters=parameters, gradient_order=order)
    assert bucket_bytes(graph.trained, item_bytes=4) == [2**20, 2**23 + 12]
    other = msgspec.structs.replace(graph, gradient_order=("w1", "w0", "w2"))
    assert bucket_bytes(other.trained, item_bytes=4) == [2**23, 2**20 + 12]


def test_measured_collectives_win_over_the_ring() -> None:
    points = tuple(
        CollectiveTime(kind="all_reduce", num_ranks=2, num_bytes=size, seconds=seconds)
        for size, seconds in ((1000, 0.1), (100_000, 1.0))
    )
    cluster = msgspec.structs.replace(machine(4), collectives=points)
    assert collective_seconds("all_reduce", 1000, 2, cluster) == pytest.approx(0.1)
    assert collective_seconds("all_reduce", 10_000, 2, cluster) == pytest.approx(0.1 * 10**0.5)
    assert collective_seconds("all_reduce", 200_000, 2, cluster) == pytest.approx(2.0)
    assert collective_seconds("all_reduce", 1, 2, cluster) == pytest.approx(0.1)
    assert collective_seconds("all_reduce", 1000, 4, cluster) == ring_seconds("all_reduce", 1000, 4, cluster)
    assert collective_seconds("all_reduce", 1000, 1, cluster) == 0


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    selene = Cluster.named("a100-80g-selene", hosts=2)
    assert selene.intra_host is not None
    assert selene.inter_host is not None
    assert ring_link(8, selene)[1] == selene.intra_host.bytes_per_second
    assert ring_link(16, selene)[1] == selene.inter_host.bytes_per_second


def test_a_link_without_a_figure_is_refused() -> None:
    graph = chain_graph()
    with pytest.raises(
        InputError, match="no figure for the link they need: probe it with --nproc 4, or add intra_host"
    ):
        estimate(graph, flat_plan(graph, 4), msgspec.structs.replace(machine(4), intra_host=None))


# Time


@pytest.mark.parametrize(("communication", "overlap", "exposed"), [(2, 1, 0), (5, 1, 2), (2, 0, 2), (2, 0.5, 1)])
def test_communication_hides_behind_compute(communication: float, overlap: float, exposed: float) -> None:
    assert exposed_seconds(communication, 3.0, overlap) == exposed


@pytest.mark.parametrize(("zero", "part"), [(0, "exposed_reduce"), (1, "exposed_reduce"), (1, "exposed_gather")])
def test_what_runs_in_one_microbatch_hides_behind_that_one_only(zero: int, part: str) -> None:
    graph, num_microbatches = chain_graph(4, (1000, 1000)), 8
    cluster = machine(4, bytes_per_second=5e7, latency_seconds=1e-12)
    one_way = 3 / 4 * 4 * 4_000_000 / 5e7
    found = estimate(graph, flat_plan(graph, 4, zero=zero, microbatch=8, num_microbatches=8), cluster).time_seconds
    seconds, hiding = (one_way, found.forward) if "gather" in part else ((2 - zero) * one_way, found.backward)
    assert getattr(found, part) == pytest.approx(seconds - hiding / num_microbatches)


@quick
@given(plans_of, machines)
def test_time_parts_add_up_to_the_step(case: tuple[Graph, Plan], cluster: Cluster) -> None:
    graph, plan = case
    cluster = msgspec.structs.replace(cluster, devices_per_host=4)
    found = estimate(graph, plan, cluster)
    assert found.step_seconds == found.time_seconds.total > 0
    assert min(msgspec.structs.astuple(found.time_seconds)) >= 0
    assert found.tokens_per_second * found.step_seconds == pytest.approx(plan.global_batch * 16)
    flops = graph.flops(plan.global_batch)
    assert found.model_flops_utilisation == pytest.approx(flops / found.step_seconds / plan.world / 1e9)


def test_a_step_by_hand() -> None:
    """Two microbatches of three samples: 4 blocks · 1e6 flops a sample forward and 2e6 backward, at 1e9 flops/s."""
    graph = chain_graph(4, (64, 8))
    found = estimate(graph, flat_plan(graph, microbatch=3, num_microbatches=2), machine(1)).time_seconds
    assert found.forward == pytest.approx(2 * 3 * 4 * 1e-3)
    assert found.backward == pytest.approx(2 * 3 * 4 * 2e-3)
    assert found.update == pytest.approx(PSI * 28 / 1e9)
    assert found.total == pytest.approx(found.forward + found.backward + found.update)


def test_sharding_shares_the_update() -> None:
    graph = chain_graph(4, (64, 8))
    whole, shared = (estimate(graph, flat_plan(graph, 4, zero=zero), machine(4)).time_seconds for zero in (0, 1))
    assert shared.update == pytest.approx(whole.update / 4)
    assert update_seconds(1000, msgspec.structs.replace(DEVICE, update_elements_per_second=500.0)) == 2.0


def test_launches_queue_on_a_gpu_and_add_up_on_a_cpu() -> None:
    graph = chain_graph(1)
    for kind, launch, seconds in (("cuda", 5.0, 5.0), ("cuda", 1e-9, 1e-3), ("cpu", 5.0, 5.001)):
        cost = ComputeCost(graph, machine(1, kind=kind, launch_seconds=launch), 1)
        assert cost.phase_seconds(graph.blocks, "forward") == pytest.approx(seconds)


def test_backward_launches_are_cheaper_where_that_was_measured() -> None:
    graph = chain_graph(1)
    cost = ComputeCost(graph, machine(1, kind="cpu", launch_seconds=5.0, backward_launch_seconds=2.0), 1)
    assert cost.phase_seconds(graph.blocks, "backward") == pytest.approx(2.002)


@quick
@given(st.dictionaries(st.floats(1, 1e6), st.floats(1e-6, 1), min_size=2, max_size=4), st.floats(1e-3, 1e9))
def test_measured_points_are_met_and_the_ends_go_on(measured: dict[float, float], work: float) -> None:
    points = sorted(measured.items())
    for size, seconds in points:
        assert kernel_seconds(size, points) == pytest.approx(seconds)
    (first, at_first), (last, at_last) = points[0], points[-1]
    if work >= last:
        assert kernel_seconds(work, points) == pytest.approx(at_last * work / last)
    elif work <= first:
        assert kernel_seconds(work, points) == pytest.approx(at_first)
    else:
        assert min(measured.values()) <= kernel_seconds(work, points) * (1 + 1e-9)
        assert kernel_seconds(work, points) <= max(measured.values()) * (1 + 1e-9)
    assert kernel_seconds(0, points) == 0


@quick
@given(st.floats(1, 1e6), st.floats(1e-6, 1), st.floats(1e-3, 1e9))
def test_a_single_point_is_a_rate(size: float, seconds: float, work: float) -> None:
    assert kernel_seconds(work, [(size, seconds)]) == pytest.approx(seconds * work / size)


@quick
@given(plans_of, bandwidths, bandwidths)
def test_a_faster_link_never_makes_a_plan_slower(case: tuple[Graph, Plan], one: float, other: float) -> None:
    slow, fast = (estimate(*case, machine(4, bytes_per_second=speed)).step_seconds for speed in sorted((one, other)))
    assert fast <= slow


# What cannot be costed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": Mesh(tp=2)}, "cannot cost tp=2 yet"),
        ({"mesh": Mesh(dp=2), "zero": 1, "hybrid": 2}, "cannot cost hybrid=2 yet"),
        ({"offload": Offload(what="optimizer")}, "cannot cost offload of optimizer yet"),
        ({"recompute": (Recompute(mode="selective", blocks=("blocks.0",)),)}, "cannot cost selective recompute yet"),
        ({"mesh": Mesh(dp=8)}, "needs 8 devices, but 'machine' has 1 × 4 = 4: lower a degree, or add hosts"),
    ],
)
def test_what_cannot_be_costed_is_refused(changes: dict[str, Any], said: str) -> None:
    graph = chain_graph()
    mesh = changes.pop("mesh", Mesh())
    stages = (Stage(coordinate=0, blocks=graph.repeated_blocks),)
    plan = Plan(mesh=mesh, stages=stages, microbatch=1, num_microbatches=1, global_batch=mesh.dp, **changes)
    with pytest.raises(PlanError, match=said):
        estimate(graph, plan, machine(4))


def test_a_precision_the_device_does_not_have_is_refused() -> None:
    v100 = Cluster.named("v100-16g-p3")
    for precision in ("bf16", "fp16"):
        graph = captured_in(precision, chain_graph())
        plan = flat_plan(graph, precision=precision)
        if precision == "fp16":
            assert estimate(graph, plan, v100).fits
            continue
        with pytest.raises(InputError, match="'V100-16GB' has no bf16 rate"):
            estimate(graph, plan, v100)


def test_fp64_takes_twice_the_time_where_it_was_not_measured() -> None:
    cpu = msgspec.structs.replace(DEVICE, kind="cpu")
    half, full = rate_points(cpu, "fp64"), rate_points(cpu, "fp32")
    assert half["matmul"] == [(1.0, 2 * full["matmul"][0][1])]


def test_a_gpu_without_an_fp64_rate_is_not_guessed() -> None:
    with pytest.raises(InputError, match="no fp64 rate"):
        rate_points(DEVICE, "fp64")


@pytest.mark.parametrize("name", ["a100-80g-selene", "h100-80g-mosaic", "rtx4090-24g", "v100-16g-p3"])
def test_every_named_cluster_can_be_costed(name: str) -> None:
    cluster, graph = Cluster.named(name, hosts=2), chain_graph()
    plan = flat_plan(graph, cluster.num_devices, zero=3)
    assert estimate(graph, plan, cluster).step_seconds > 0


def test_a_budget_decides_what_fits() -> None:
    graph = chain_graph()
    peak = estimate(graph, flat_plan(graph), machine(1)).peak_bytes
    for budget, fits in ((peak, True), (peak - 1, False)):
        found = estimate(graph, flat_plan(graph), machine(1), budget_bytes=budget)
        assert (found.budget_bytes, found.fits) == (budget, fits)


@quick
@given(graphs, divisors(4))
def test_groups_hold_every_parameter_once(graph: Graph, dp: int) -> None:
    groups = groups_of(graph, flat_plan(graph, dp, zero=min(dp - 1, 3)))
    assert sum(total_elements(group) for group in groups.values()) == graph.num_parameters
    assert all(groups.values())
