"""Estimates as a whole: parts add up, bubbles are the textbook's, and better hardware is never slower."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from machines import (
    bandwidths,
    captured_in,
    chain_graph,
    flat_plan,
    machine,
    machines,
    named_machine,
    plan_for,
    plans_of,
)
from strategies import quick
from transformer import transformer_graph

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, InputError, PlanError
from meshwright.core.graph import Graph
from meshwright.core.plan import Mesh, Offload, Plan, Stage
from meshwright.core.recipe import Recipe, TrainingSystem
from meshwright.core.units import GIB
from meshwright.cost.estimate import Estimator, check_memory_of_all, estimate

PSI = 4 * 64 * 8
"""Parameters of `chain_graph(4, (64, 8))`."""

layouts = st.sampled_from(
    [
        {},
        {"tp": 2},
        {"tp": 4, "sequence_parallel": True},
        {"cp": 2},
        {"cp": 2, "tp": 2},
        {"pp": 2, "global_batch": 4},
        {"pp": 2, "virtual": 2, "schedule": "interleaved", "global_batch": 4},
        {"pp": 2, "schedule": "zb", "global_batch": 4},
        {"pp": 2, "tp": 2, "dp": 2, "zero": 1, "global_batch": 8},
        {"dp": 4, "zero": 2, "global_batch": 8},
        {"dp": 4, "zero": 3, "hybrid": 2, "global_batch": 4},
        {"offload": "optimizer"},
        {"offload": "parameters", "dp": 2, "zero": 3, "global_batch": 2},
    ]
)
settings_of = st.fixed_dictionaries(
    {
        "recompute": st.sampled_from(["none", "selective", "full", "every:2"]),
        "compile": st.booleans(),
        "microbatch": st.just(1),
    }
)
TRANSFORMER = transformer_graph(layers=4, hidden=64, heads=4, seq=32)


# Time


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


@quick
@given(layouts, settings_of)
def test_the_step_is_what_the_schedule_plays_and_what_comes_after(
    layout: dict[str, Any], choice: dict[str, Any]
) -> None:
    plan = plan_for(TRANSFORMER, **layout, **choice)
    cluster, recipe = named_machine(8, step_overhead_seconds=1.0), Recipe()
    found, played = estimate(TRANSFORMER, plan, cluster, recipe), Estimator(TRANSFORMER, plan, cluster, recipe).played()
    parts = found.time_seconds
    assert min(msgspec.structs.astuple(parts)) >= 0
    assert parts.other >= 1.0
    waiting = parts.transfer - played.exposed_seconds[played.busiest]  # for the host, under offload
    after = parts.update + parts.other + waiting
    assert found.step_seconds == pytest.approx(played.step_seconds + after)
    assert found.bubble == played.bubble
    assert 0 < found.model_flops_utilisation < 1


def test_a_step_by_hand() -> None:
    """Two microbatches of three samples: 4 blocks · 1e6 flops a sample forward and 2e6 backward, at 1e9 flops/s."""
    graph = chain_graph(4, (64, 8))
    found = estimate(graph, flat_plan(graph, microbatch=3, num_microbatches=2), machine(1)).time_seconds
    assert found.forward == pytest.approx(2 * 3 * 4 * 1e-3)
    assert found.backward == pytest.approx(2 * 3 * 4 * 2e-3)
    assert found.update == pytest.approx(PSI * 28 / 1e9)
    assert found.other == pytest.approx(PSI * 12 / 1e9)  # the second microbatch's gradients added to the first's
    assert found.total == pytest.approx(found.forward + found.backward + found.update + found.other)


def test_sharding_shares_the_update() -> None:
    graph = chain_graph(4, (64, 8))
    whole, shared = (estimate(graph, flat_plan(graph, 4, zero=zero), machine(4)).time_seconds for zero in (0, 1))
    assert shared.update == pytest.approx(whole.update / 4)


def test_full_recompute_takes_a_third_more_compute_and_less_memory() -> None:
    graph = chain_graph(8)
    plain, again = (estimate(graph, flat_plan(graph, microbatch=64, recompute=r), machine(1)) for r in ((), "full"))
    assert again.peak_bytes < plain.peak_bytes
    assert again.time_seconds.recompute == plain.time_seconds.forward
    compute = plain.time_seconds.forward + plain.time_seconds.backward
    assert again.time_seconds.recompute / compute == pytest.approx(1 / 3)


@pytest.mark.parametrize(("zero", "part"), [(0, "exposed_reduce"), (1, "exposed_reduce"), (1, "exposed_gather")])
def test_what_runs_once_a_step_hides_behind_one_microbatch_only(zero: int, part: str) -> None:
    """A link that is the bottleneck: all of it shows but what four blocks of one microbatch hide."""
    graph, num_microbatches = chain_graph(4, (1000, 1000)), 8
    cluster = machine(4, bytes_per_second=5e7, latency_seconds=1e-12)
    one_way = 3 / 4 * 4 * 4_000_000 / 5e7
    found = estimate(graph, flat_plan(graph, 4, zero=zero, microbatch=8, num_microbatches=8), cluster).time_seconds
    seconds, compute = (one_way, found.forward) if "gather" in part else ((2 - zero) * one_way, found.backward)
    packed = zero * 4_000_000 * 4 / 4 * (2 + 2 * 4 if "gather" in part else 2 * 4) / 1e9
    hiding = 3 / 4 * compute / num_microbatches  # the first gather, and the last block's reduction, find no compute
    assert getattr(found, part) == pytest.approx(seconds + packed - hiding)


def test_gradients_that_are_not_overlapped_show_whole() -> None:
    graph = chain_graph(4, (64, 8))
    cluster = machine(4, bytes_per_second=1e9, latency_seconds=1e-12)
    found = estimate(graph, flat_plan(graph, 4), cluster, Recipe(system=TrainingSystem(overlaps_reduction=False)))
    assert found.time_seconds.exposed_reduce == pytest.approx(2 * 3 / 4 * 4 * PSI / 1e9)


def test_inner_communication_is_waited_for() -> None:
    found = estimate(TRANSFORMER, plan_for(TRANSFORMER, tp=2, microbatch=1, global_batch=3), machine(8)).time_seconds
    stream, tokens = 32 * 64 * 2, 32 * 4
    once = (4 * 4 + 2) * (1e-6 + stream / 2 / 1e9) + 3 * (1e-6 + tokens / 2 / 1e9)
    assert found.exposed_inner == pytest.approx(3 * 2 * once)


def test_what_is_in_no_block_is_gathered_and_reduced_where_nothing_else_of_it_runs() -> None:
    """A table in a stage that has no pass outside its blocks still moves."""
    graph = transformer_graph(layers=2)
    bare = msgspec.structs.replace(graph, timeline=tuple(s for s in graph.timeline if s.block or s.number in (1, 2)))
    slow = machine(4, bytes_per_second=1e3)
    plan = plan_for(bare, pp=2, dp=2, zero=1, global_batch=2)
    with_table = Estimator(bare, plan, slow, Recipe()).stages[0]
    assert with_table.gather_once > 2048 * 64 * 2 / 2 / 1e3
    assert with_table.reduce_once > 2048 * 64 * 4 / 2 / 1e3


def test_what_is_in_no_block_is_counted_once_on_a_coordinate_with_several_stages() -> None:
    graph = transformer_graph(layers=4)
    slow = machine(4, bytes_per_second=1e3, latency_seconds=1e-12)
    plan = plan_for(graph, pp=2, virtual=2, schedule="interleaved", dp=2, zero=1, global_batch=4, microbatch=1)
    stages = Estimator(graph, plan, slow, Recipe()).stages
    last = sum(p.num_elements for p in graph.parameters if p.block in ("norm", "head", "blocks.1", "blocks.3"))
    gathered = stages[1].gather_once + stages[3].gather_once
    assert gathered == pytest.approx(last / 2 * 2 / 1e3, rel=0.01)


# Bubbles


def free_links(num_devices: int) -> Cluster:
    return machine(num_devices, bytes_per_second=1e30, latency_seconds=1e-30)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [4, 8])
def test_the_bubble_of_gpipe_and_1f1b(schedule: str, p: int, m: int) -> None:
    """(p-1)/m of ideal time for equal stages and free links."""
    graph = chain_graph(4)
    found = estimate(graph, plan_for(graph, pp=p, schedule=schedule, microbatch=1, global_batch=m), free_links(p))
    assert found.bubble == pytest.approx((p - 1) / m)
    parts = found.time_seconds
    assert parts.bubble == pytest.approx((p - 1) / m * (parts.forward + parts.backward))
    assert parts.transfer == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("p", "virtual", "m"), [(2, 2, 4), (4, 2, 8), (4, 4, 8), (2, 4, 2)])
def test_the_bubble_of_interleaved_1f1b(p: int, virtual: int, m: int) -> None:
    graph = chain_graph(p * virtual)
    plan = plan_for(graph, pp=p, virtual=virtual, schedule="interleaved", microbatch=1, global_batch=m)
    assert estimate(graph, plan, free_links(p)).bubble == pytest.approx((p - 1) / (virtual * m))


def test_zero_bubble_schedules_do_weights_later() -> None:
    """ZB-H1: (p-1)(f + b_inputs - b_weights), a third of 1F1B's where all three are equal."""
    graph, p, m = chain_graph(4), 4, 8
    common = {"pp": p, "microbatch": 1, "global_batch": m}
    plain, zb = (estimate(graph, plan_for(graph, schedule=s, **common), free_links(p)) for s in ("1f1b", "zb"))
    assert zb.bubble == pytest.approx(plain.bubble / 3)


def test_a_slow_link_between_stages_shows_as_transfer() -> None:
    graph = chain_graph(4)
    plan = plan_for(graph, pp=2, microbatch=1, global_batch=4)
    free, slow = (estimate(graph, plan, machine(2, bytes_per_second=speed)) for speed in (1e12, 1e4))
    assert slow.time_seconds.transfer > free.time_seconds.transfer
    held = estimate(
        graph, plan, machine(2, bytes_per_second=1e4), Recipe(system=TrainingSystem(blocking_transfers=True))
    )
    assert held.step_seconds >= slow.step_seconds


# Better hardware


@quick
@given(plans_of, bandwidths, bandwidths)
def test_a_faster_link_never_makes_a_plan_slower(case: tuple[Graph, Plan], one: float, other: float) -> None:
    slow, fast = (estimate(*case, machine(4, bytes_per_second=speed)).step_seconds for speed in sorted((one, other)))
    assert fast <= slow * (1 + 1e-12)


def scaled(cluster: Cluster, name: str, factor: float) -> Cluster:
    """The same machine with one figure larger."""
    device = cluster.device
    if name in ("intra_host", "inter_host", "host_link"):
        link = getattr(cluster, name)
        faster = msgspec.structs.replace(link, bytes_per_second=factor * link.bytes_per_second)
        return msgspec.structs.replace(cluster, **{name: faster})
    if name == "bytes_per_second":
        device = msgspec.structs.replace(device, bytes_per_second=factor * device.bytes_per_second)
    elif name == "peaks":
        device = msgspec.structs.replace(device, peaks={key: factor * peak for key, peak in device.peaks.items()})
    else:
        share = min(1.0, factor * getattr(device.constants, name))
        device = msgspec.structs.replace(device, constants=msgspec.structs.replace(device.constants, **{name: share}))
    return msgspec.structs.replace(cluster, device=device)


FIGURES = (
    "intra_host", "inter_host", "host_link", "bytes_per_second", "peaks",
    "matmul_share", "attention_share", "elementwise_share", "softmax_share", "intra_host_share", "inter_host_share",
)  # fmt: skip


@quick
@given(layouts, settings_of, st.sampled_from(FIGURES), st.floats(1, 4), st.sampled_from([1, 8]))
def test_better_hardware_never_makes_a_plan_slower(
    layout: dict[str, Any], choice: dict[str, Any], name: str, factor: float, per_host: int
) -> None:
    """But for zb, where launches decide: of a backward that stays as long, less is left to do later."""
    assume(layout.get("schedule") != "zb" or "host" in name)
    plan, cluster = plan_for(TRANSFORMER, **layout, **choice), named_machine(per_host, hosts=8 // per_host)
    before = estimate(TRANSFORMER, plan, cluster)
    after = estimate(TRANSFORMER, plan, scaled(cluster, name, factor))
    assert after.step_seconds <= before.step_seconds * (1 + 1e-9)
    assert after.peak_bytes == before.peak_bytes


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_across_hosts_is_slower_than_inside_one(tp: int) -> None:
    plan = plan_for(TRANSFORMER, tp=tp)
    inside, across = (estimate(TRANSFORMER, plan, named_machine(per_host, hosts=8 // per_host)) for per_host in (8, 1))
    assert across.time_seconds.exposed_inner > inside.time_seconds.exposed_inner


def test_tp_and_cp_divide_the_compute_of_large_blocks() -> None:
    graph = transformer_graph(layers=2, hidden=4096, heads=32, seq=32768)
    alone, *divided = (
        estimate(graph, plan_for(graph, **layout), named_machine()).time_seconds
        for layout in ({}, {"tp": 8, "sequence_parallel": True}, {"cp": 8})
    )
    for parts in divided:
        assert (alone.forward + alone.backward) / (parts.forward + parts.backward) == pytest.approx(8, rel=0.15)


# What fits


def test_a_budget_decides_what_fits() -> None:
    graph = chain_graph()
    peak = estimate(graph, flat_plan(graph), machine(1)).peak_bytes
    for budget, fits in ((peak, True), (peak - 1, False)):
        found = estimate(graph, flat_plan(graph), machine(1), budget_bytes=budget)
        assert (found.budget_bytes, found.fits) == (budget, fits)


def test_slack_and_driver_must_fit_too() -> None:
    graph, cluster = chain_graph(), named_machine(context_bytes=1000.0, allocator_slack_share=0.5)
    graph = captured_in("fp16", graph)
    found = estimate(graph, flat_plan(graph), cluster)
    assert found.reserved_bytes == round(1.5 * found.peak_bytes)
    assert found.context_bytes == 1000
    for budget, fits in ((found.reserved_bytes + 1000, True), (found.reserved_bytes + 999, False)):
        assert estimate(graph, flat_plan(graph), cluster, budget_bytes=budget).fits == fits
    assert found.budget_bytes == cluster.device.memory_bytes


@pytest.mark.parametrize(("layout", "groups"), [({}, 0), ({"tp": 2}, 2), ({"tp": 2, "cp": 2, "pp": 2}, 4)])
def test_every_axis_in_use_holds_buffers_and_so_does_the_group_of_all(layout: dict[str, int], groups: int) -> None:
    cluster = named_machine(context_bytes=1000.0, communicator_bytes=10.0)
    found = estimate(TRANSFORMER, plan_for(TRANSFORMER, **layout), cluster)
    assert found.context_bytes == 1000 + 10 * groups


def test_parameters_larger_than_all_memory_are_refused_unless_hosts_keep_them() -> None:
    graph, small = chain_graph(4, (64, 64)), machine(2, memory_bytes=30_000)
    with pytest.raises(InfeasibleError, match=r"the parameters alone take 64\.00 KiB in fp32, more than all 2 devices"):
        check_memory_of_all(graph, flat_plan(graph, 2, zero=3), small)
    hosted = msgspec.structs.replace(small, host_link=small.intra_host)
    plan = flat_plan(graph, 2, offload=Offload(what="parameters"))
    check_memory_of_all(graph, plan, hosted)
    assert estimate(graph, plan, hosted).host_bytes > 0


def test_where_the_host_is_the_device_all_ranks_share_its_memory() -> None:
    graph = chain_graph()
    found = estimate(graph, flat_plan(graph, 4), machine(4, kind="cpu"))
    assert (found.host_bytes, found.reserved_bytes, found.context_bytes) == (4 * found.peak_bytes, 0, 0)


# What cannot be costed


def test_more_ranks_than_devices_are_refused() -> None:
    graph = chain_graph()
    with pytest.raises(PlanError, match="needs 8 devices, but 'machine' has 1 × 4 = 4: lower a degree, or add hosts"):
        estimate(graph, flat_plan(graph, 8), machine(4))
    assert estimate(graph, flat_plan(graph, 8), machine(4, hosts=2)).step_seconds > 0


def test_a_plan_in_another_precision_than_the_capture_is_refused() -> None:
    graph = chain_graph(4)
    with pytest.raises(PlanError, match="the plan computes in bf16, but the graph was captured in fp32: capture the"):
        estimate(graph, flat_plan(graph, precision="bf16"), machine(1))


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (("blocks.0-2",), "disagree on block 'blocks.3', missing in it: make the plan for this model"),
        (("blocks.0-4",), "disagree on block 'blocks.4', which the model does not have: make the plan for this model"),
    ],
)
def test_a_plan_for_another_model_is_refused(blocks: tuple[str, ...], said: str) -> None:
    stages = (Stage(coordinate=0, blocks=blocks),)
    plan = Plan(mesh=Mesh(), stages=stages, microbatch=1, num_microbatches=1, global_batch=1)
    with pytest.raises(PlanError, match=said):
        estimate(chain_graph(4), plan, machine(1))


def test_a_precision_the_device_does_not_have_is_refused() -> None:
    v100 = Cluster.named("v100-16g-p3")
    half, brain = (captured_in(precision, chain_graph()) for precision in ("fp16", "bf16"))
    assert estimate(half, flat_plan(half), v100).fits
    with pytest.raises(InputError, match="'V100-16GB' has no bf16 rate"):
        estimate(brain, flat_plan(brain), v100)


@pytest.mark.parametrize("name", ["a100-80g-selene", "h100-80g-mosaic", "rtx4090-24g", "v100-16g-p3"])
def test_every_named_cluster_can_be_costed(name: str) -> None:
    cluster = Cluster.named(name, hosts=2)
    plan = flat_plan(TRANSFORMER, cluster.num_devices, zero=3)
    found = estimate(TRANSFORMER, plan, cluster)
    assert 0 < found.model_flops_utilisation < 1
    assert found.context_bytes < 2 * GIB
