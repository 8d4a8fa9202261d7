"""Seconds of one kernel: the analytic model of a named device, and the measurements of a probed one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import DEVICE, chain_graph, flat_plan, machine, named_machine
from strategies import quick
from transformer import transformer_graph

from meshwright.core.constants import Constants
from meshwright.core.errors import InputError
from meshwright.core.graph import Affine, Op
from meshwright.core.recipe import Recipe, TrainingSystem
from meshwright.cost.compute.analytical_kernels import Kernels, MatmulSize
from meshwright.cost.compute.block_compute import ComputeCost, Work
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.cost.compute.optimizer_update import clip_seconds, update_seconds
from meshwright.cost.local_block import LocalBlock, make_local_blocks
from meshwright.cost.measurements import interpolated_seconds, measured_kernels


def kernels(**constants: Any) -> Kernels:
    """1e15 flops/s, 1e12 bytes/s."""
    device = named_machine(**constants).device
    assert device.constants is not None
    return Kernels(device, device.constants)


def square(rows: float, columns: float, depth: float, batch: float = 1) -> MatmulSize:
    return MatmulSize(batch, rows, columns, depth, (round(columns), round(depth)))


def flops(size: MatmulSize) -> float:
    return 2 * size.batch * size.rows * size.columns * size.depth


dims = st.integers(1, 4096)
sizes_of = st.builds(square, dims, dims, dims, st.sampled_from([1, 2, 16]))


# Matmul


@quick
@given(sizes_of)
def test_a_matmul_never_beats_its_share_of_the_peak_or_the_memory(size: MatmulSize) -> None:
    model = kernels()
    seconds = model.matmul_seconds(size, "bf16")
    assert seconds >= flops(size) / (model.constants.matmul_share * 1e15)
    elements = size.batch * (size.rows * size.depth + size.depth * size.columns + size.rows * size.columns)
    assert seconds >= 2 * elements / 1e12
    assert seconds >= model.constants.kernel_floor_seconds


def test_a_large_matmul_reaches_its_share() -> None:
    model = kernels(matmul_ramp_seconds=0, num_multiprocessors=128, kernel_floor_seconds=0)
    size = square(16384, 16384, 16384)  # 8,192 tiles of 256 × 128: 64 whole waves
    assert model.matmul_seconds(size, "bf16") == pytest.approx(flops(size) / (0.82 * 1e15))


def test_one_tile_more_than_a_wave_costs_more_than_its_flops() -> None:
    """128 × 128 tiles of 256 × 128 fill P = 128 once; one row of tiles more starts a second wave."""
    model = kernels(num_multiprocessors=128, kernel_floor_seconds=0)
    full, more = square(2048, 2048, 8192), square(2048 + 256, 2048, 8192)
    assert model.matmul_seconds(full, "bf16") < model.matmul_seconds(more, "bf16")
    growth = model.matmul_seconds(more, "bf16") / model.matmul_seconds(full, "bf16")
    assert growth > flops(more) / flops(full)


def test_a_part_of_a_tile_is_paid_whole() -> None:
    model = kernels(num_multiprocessors=128, kernel_floor_seconds=0)
    narrow, whole = (model.matmul_seconds(square(2000, n, 8192), "bf16") for n in (2000, 2048))
    assert narrow == pytest.approx(whole, rel=0.05)


def test_few_tiles_leave_multiprocessors_idle() -> None:
    model = kernels(kernel_floor_seconds=0)
    small, large = square(128, 128, 4096), square(8192, 8192, 4096)
    assert flops(small) / model.matmul_seconds(small, "bf16") < 0.1 * flops(large) / model.matmul_seconds(large, "bf16")


def test_a_short_sum_does_not_reach_the_rate() -> None:
    model = kernels(kernel_floor_seconds=0)
    short, deep = square(8192, 8192, 128), square(8192, 8192, 8192)
    assert flops(short) / model.matmul_seconds(short, "bf16") < 0.5 * flops(deep) / model.matmul_seconds(deep, "bf16")


def test_widths_that_do_not_divide_by_eight_are_slow() -> None:
    """A head 108 wide divides by 4 only; 112 and 128 by 8."""
    model = kernels(kernel_floor_seconds=0)
    known = model.constants
    shares = {width: model.alignment_share(square(4096, 4096, width)) for width in (108, 112, 128, 106, 107)}
    assert shares == {
        108: known.matmul_aligned_by_4_share,
        112: 1.0,
        128: 1.0,
        106: known.matmul_aligned_by_2_share,
        107: known.matmul_unaligned_share,
    }
    fast = Kernels(msgspec.structs.replace(model.device, bytes_per_second=1e15), known)  # so that flops decide
    narrow, even, wide = (fast.matmul_seconds(square(4096, 4096, width), "bf16") for width in (108, 112, 128))
    assert even < wide < narrow


@pytest.mark.parametrize(("dtype", "slower"), [("fp16", 1), ("bf16", 1), ("fp32", 2), ("fp64", 4)])
def test_dtypes_have_their_own_peaks(dtype: Any, slower: float) -> None:
    """fp64 at half of fp32 where nobody says otherwise."""
    assert kernels().peak(dtype) == 1e15 / slower


@quick
@given(sizes_of, st.floats(0.1, 1), st.floats(0.1, 1))
def test_a_larger_share_is_never_slower(size: MatmulSize, one: float, other: float) -> None:
    low, high = sorted((one, other))
    slow, fast = (kernels(matmul_share=share).matmul_seconds(size, "bf16") for share in (low, high))
    assert fast <= slow


# Attention and the rest


def attention(phase: Any = "forward") -> Op:
    return Op(name="attention", kind="attention", phase=phase, dtype="bf16")


def test_attention_slows_for_short_sequences_and_narrow_heads() -> None:
    model = kernels(kernel_floor_seconds=0)
    known = model.constants
    long = model.attention_seconds(attention(), 1e15, 1e12, 128)
    assert long == pytest.approx(1 / known.attention_share)
    assert model.attention_seconds(attention(), 1e15, known.attention_ramp_length, 128) == pytest.approx(2 * long)
    by_width = [model.attention_seconds(attention(), 1e15, 1e12, width) for width in (128, 96, 64, 32)]
    assert by_width[0] == min(by_width)
    assert by_width[3] == pytest.approx(2 * by_width[2])
    assert by_width[2] == pytest.approx(long / known.narrow_head_share)
    assert model.attention_seconds(attention("backward"), 1e15, 1e12, 128) > long


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_causal_attention_does_half(phase: str) -> None:
    graph = transformer_graph()
    local_block = make_local_blocks(graph, flat_plan(graph))["blocks.0"]
    costs = KernelCosts(graph, named_machine(kernel_floor_seconds=0).device)
    (number,) = [n for n, op in enumerate(local_block.kind.ops) if op.kind == "attention" and op.phase == phase]
    ops = list(local_block.kind.ops)
    ops[number] = msgspec.structs.replace(ops[number], causal=False)
    other = LocalBlock(
        msgspec.structs.replace(local_block.kind, ops=tuple(ops)), local_block.labels, local_block.degrees
    )
    assert costs.op_seconds(other, number, 4) == pytest.approx(2 * costs.op_seconds(local_block, number, 4))


def op(name: str, kind: Any, phase: Any = "forward", read: float = 100.0, written: float = 100.0) -> Op:
    return Op(name=name, kind=kind, phase=phase, read_bytes=Affine(0, read), written_bytes=Affine(0, written))


@pytest.mark.parametrize(
    ("one", "field"),
    [
        (op("add", "elementwise"), "elementwise_share"),
        (op("gelu", "transcendental"), "transcendental_share"),
        (op("native_layer_norm", "normalisation"), "normalisation_share"),
        (op("native_layer_norm_backward", "normalisation", "backward"), "normalisation_backward_share"),
        (op("_softmax", "normalisation"), "softmax_share"),
        (op("_log_softmax_backward_data", "normalisation", "backward"), "softmax_share"),
        (op("sum", "reduction"), "reduction_share"),
        (op("clone", "copy"), "copy_share"),
        (op("_to_copy", "copy", read=100, written=200), "cast_up_share"),
        (op("_to_copy", "copy", read=200, written=100), "copy_share"),
    ],
)
def test_ops_that_move_bytes_reach_the_share_of_their_kind(one: Op, field: str) -> None:
    model = kernels(kernel_floor_seconds=1e-6)
    share = getattr(Constants(), field)
    assert model.bytes_seconds(one, 1e12) == pytest.approx(1 / share + 1e-6)


# Launches


def pass_seconds(
    kind: str, launch: float, phase: str = "forward", recipe: Recipe | None = None, **device: Any
) -> float:
    graph, cluster = chain_graph(1), machine(1, kind=kind, launch_seconds=launch, **device)
    plan = flat_plan(graph)
    cost = ComputeCost(graph, plan, cluster, recipe or Recipe())
    work = cost.pass_work(make_local_blocks(graph, plan)["blocks.0"], "blocks.0", int(phase == "backward"))
    return work.seconds(cluster.device)


@pytest.mark.parametrize(("kind", "launch", "seconds"), [("cuda", 5.0, 5.0), ("cuda", 1e-9, 1e-3), ("cpu", 5.0, 5.001)])
def test_launches_queue_on_a_gpu_and_add_up_on_a_cpu(kind: str, launch: float, seconds: float) -> None:
    assert pass_seconds(kind, launch) == pytest.approx(seconds)


def test_backward_launches_are_cheaper_where_that_was_measured() -> None:
    assert pass_seconds("cpu", 5.0, "backward", backward_launch_seconds=2.0) == pytest.approx(2 * 2.001)
    assert pass_seconds("cpu", 5.0, "backward") == pytest.approx(2 * 5.001)


def test_a_host_that_waits_for_every_kernel_launches_there_and_back() -> None:
    waiting = Recipe(system=TrainingSystem(blocking_launches=True))
    assert pass_seconds("cuda", 5.0, recipe=waiting) == pytest.approx(2 * 5.0 + 1e-3)
    assert pass_seconds("cuda", 5.0, "backward", waiting) == pytest.approx(2 * (2 * 5.0 + 1e-3))


def test_work_adds_up_before_it_queues() -> None:
    work = Work(1.0, 2.0) + Work(4.0, 1.0)
    assert (work.launch, work.kernel, work.seconds(DEVICE)) == (5.0, 3.0, 5.0)


# Points


@quick
@given(st.dictionaries(st.floats(1, 1e6), st.floats(1e-6, 1), min_size=2, max_size=4), st.floats(1e-3, 1e9))
def test_measured_points_are_met_and_the_ends_go_on(measured: dict[float, float], work: float) -> None:
    measurements = sorted(measured.items())
    for size, seconds in measurements:
        assert interpolated_seconds(size, measurements) == pytest.approx(seconds)
    (first, at_first), (last, at_last) = measurements[0], measurements[-1]
    if work >= last:
        assert interpolated_seconds(work, measurements) == pytest.approx(at_last * work / last)
    elif work <= first:
        assert interpolated_seconds(work, measurements) == pytest.approx(at_first)
        assert interpolated_seconds(work, measurements, has_least=False) == pytest.approx(at_first * work / first)
    else:
        assert min(measured.values()) <= interpolated_seconds(work, measurements) * (1 + 1e-9)
        assert interpolated_seconds(work, measurements) <= max(measured.values()) * (1 + 1e-9)
    assert interpolated_seconds(0, measurements) == 0


@quick
@given(st.floats(1, 1e6), st.floats(1e-6, 1), st.floats(1e-3, 1e9))
def test_a_single_point_is_a_rate(size: float, seconds: float, work: float) -> None:
    assert interpolated_seconds(work, [(size, seconds)]) == pytest.approx(seconds * work / size)


def test_fp64_takes_twice_the_time_where_it_was_not_measured() -> None:
    cpu = msgspec.structs.replace(DEVICE, kind="cpu")
    half, full = measured_kernels(cpu, "fp64"), measured_kernels(cpu, "fp32")
    assert half["matmul"] == [(1.0, 2 * full["matmul"][0][1])]


def test_a_gpu_without_an_fp64_rate_is_not_guessed() -> None:
    with pytest.raises(InputError, match="no fp64 rate"):
        measured_kernels(DEVICE, "fp64")


def test_a_kind_of_op_that_was_not_measured_is_refused() -> None:
    rates = tuple(rate for rate in DEVICE.rates if rate.kind != "attention")
    with pytest.raises(InputError, match="no fp16 rate for attention"):
        KernelCosts(transformer_graph(), msgspec.structs.replace(DEVICE, rates=rates))


# The update


def test_the_update_is_bound_by_memory_unless_it_was_measured() -> None:
    assert update_seconds(1000, msgspec.structs.replace(DEVICE, update_elements_per_second=500.0)) == 2.0
    assert update_seconds(1e9, DEVICE) == pytest.approx(28)
    named = named_machine(update_share=0.5).device
    assert update_seconds(1e9, named) == pytest.approx(28e9 / 0.5e12)


def test_clipping_reads_twice_and_writes_once() -> None:
    quick_launch = msgspec.structs.replace(DEVICE, launch_seconds=1e-12)
    assert clip_seconds(1e9, 1, quick_launch) == pytest.approx(12)
    assert clip_seconds(1, 10, msgspec.structs.replace(DEVICE, launch_seconds=1.0)) == 20
