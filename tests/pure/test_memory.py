"""Memory by hand: state under ZeRO, activations of blocks and schedules. Ψ: parameters, N: ranks."""

from __future__ import annotations

from functools import partial
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
    chain_graph,
    flat_plan,
    graphs,
    machine,
    machines,
    named_machine,
    plan_for,
    plans_of,
)
from strategies import degrees, quick
from transformer import Sizes, transformer_graph

from meshwright.core.cluster import Cluster, Device
from meshwright.core.estimate import MemoryParts
from meshwright.core.graph import Affine, Graph, MemoryEvent, Parameter, Pass, Segment
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe, TrainingSystem
from meshwright.cost.estimate import estimate
from meshwright.cost.local_block import make_local_blocks
from meshwright.cost.memory.footprint import Footprints
from meshwright.cost.memory.local_parameters import local_parameters, shard_elements
from meshwright.cost.memory.peak_memory import MemoryCost, Moment
from meshwright.cost.memory.rank_state import RankState
from meshwright.cost.passes import passes_by_stage
from meshwright.rules.schedules import make_order

ADAM = Recipe(optimizer_slots=2, optimizer_scalar_bytes=0)
"""The textbook's Adam: two tensors, its step counts left out."""
MASTERS = TrainingSystem(parameter_item_bytes=2, gradient_item_bytes=2, master_item_bytes=4)
MIXED = Recipe(optimizer_scalar_bytes=0, system=MASTERS)
"""16-bit parameters and gradients, an fp32 master: 2 + 2 + 12 bytes a parameter."""
PSI = 4 * 64 * 8
"""Parameters of `chain_graph(4, (64, 8))`, which every power of two up to 64 divides."""


def walk(graph: Graph, plan: Plan, recipe: Recipe = ADAM, device: Device = DEVICE, coordinate: int = 0) -> list[Moment]:
    """Every moment of one coordinate; the last is the update."""
    order = make_order(plan.schedule, plan.mesh.pp, plan.num_microbatches, plan.virtual)
    return list(memory_cost(graph, plan, recipe).moments(coordinate, order, device))


def memory_cost(graph: Graph, plan: Plan, recipe: Recipe = ADAM) -> MemoryCost:
    rank_state = partial(RankState, graph, plan, recipe)
    return MemoryCost(plan, recipe, make_local_blocks(graph, plan), passes_by_stage(graph, plan), rank_state)


def parts_of(*args: Any, **kwargs: Any) -> list[MemoryParts]:
    return [moment.memory for moment in walk(*args, **kwargs)]


def end_of_backward(graph: Graph, plan: Plan, recipe: Recipe = ADAM) -> MemoryParts:
    """Memory in the last pass of the last microbatch's backward, when all gradients exist."""
    *_, last, _update = parts_of(graph, plan, recipe)
    return last


def state_bytes(parts: MemoryParts) -> int:
    return parts.parameters + parts.gradients + parts.optimizer_state + parts.gathered_parameters


# Shards


@quick
@given(st.lists(st.integers(1, 50), min_size=1, max_size=3).map(tuple), st.integers(1, 16))
def test_shards_sum_to_the_whole_and_the_last_is_padded(shape: tuple[int, ...], num_ranks: int) -> None:
    parameter = Parameter(name="w", shape=shape, dtype="float32")
    size, row = shard_elements(parameter, num_ranks), parameter.num_elements // shape[0]
    starts = range(0, parameter.num_elements, size)
    assert len(starts) <= num_ranks
    assert sum(min(size, parameter.num_elements - first) for first in starts) == parameter.num_elements
    assert size == row * -(-shape[0] // num_ranks)


@pytest.mark.parametrize(
    ("shape", "num_ranks", "elements"),
    [((8, 3), 4, 6), ((5, 3), 4, 6), ((2, 3), 4, 3), ((7,), 2, 4), ((), 4, 1), ((5, 3), 1, 15), ((0, 3), 2, 0)],
)
def test_the_padded_shard(shape: tuple[int, ...], num_ranks: int, elements: int) -> None:
    assert shard_elements(Parameter(name="w", shape=shape, dtype="float32"), num_ranks) == elements


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_cuts_split_tensors_only(tp: int) -> None:
    graph = transformer_graph()
    whole = {p.name: p.num_elements for p in graph.parameters}
    here = {p.name: p.num_elements for p in local_parameters(graph, plan_for(graph, tp=tp), 0)}
    assert set(here) == set(whole)
    cut = {name for name in whole if here[name] * tp == whole[name]}
    assert {name for name in whole if here[name] == whole[name]} == set(whole) - cut
    assert "blocks.0.mlp.expand.bias" in cut
    assert not cut & {"position_embedding.weight", "norm.weight", "blocks.0.attention.output.bias"}


def test_a_tied_head_on_another_coordinate_is_held_there_too() -> None:
    graph = transformer_graph(tied=True, layers=2)
    plan = plan_for(graph, pp=2)
    first, last = ({p.name for p in local_parameters(graph, plan, where)} for where in (0, 1))
    assert "token_embedding.weight" in first
    assert "head.weight" in last
    (alone,) = [{p.name for p in local_parameters(graph, plan_for(graph), 0)}]
    assert "head.weight" not in alone


# ZeRO


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
    found = parts_of(graph, flat_plan(graph, num_ranks, zero=3, num_microbatches=2))
    block = 4 * 64 * 8
    forward, backward, reducing = found[:4], found[4:12:2], found[5:12:2]
    assert [parts.gathered_parameters for parts in (*forward, *backward, *reducing)] == [block] * 8 + [0] * 4
    for parts, own in [(parts, 0) for parts in (*forward, *reducing)] + [(parts, block) for parts in backward]:
        assert state_bytes(parts) - parts.gathered_parameters == 16 * PSI // num_ranks + own  # its gradient is whole


@pytest.mark.parametrize(("kind", "copies"), [("cpu", 2), ("cuda", 1)])
def test_zero_3_gathers_ahead_and_reduces_behind(kind: str, copies: int) -> None:
    """Flat buffers: in backward that of the block before, gathered, and of the block after, reduced."""
    graph = chain_graph(4, (64, 8))
    device = msgspec.structs.replace(DEVICE, kind=kind)
    found = [moment.memory for moment in walk(graph, flat_plan(graph, 2, zero=3), device=device)]
    block = 4 * 64 * 8
    assert [parts.communication_buffers for parts in found[:4]] == [block] * 4
    assert [parts.communication_buffers for parts in found[4:12:2]] == [block, 2 * block, 2 * block, block]
    ahead = [block, block, block, 0]
    assert [parts.communication_buffers for parts in found[5:12:2]] == [copies * block + flat for flat in ahead]


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_known_point_of_the_zero_paper(zero: int, gigabytes: float) -> None:
    """Ψ = 7.5e9, N = 64, mixed-precision Adam: 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N."""
    graph, psi, num_ranks = chain_graph(10, (64, 11_718_750)), 7_500_000_000, 64
    assert graph.num_parameters == psi
    plan = flat_plan(graph, num_ranks, zero=zero, precision="bf16", num_microbatches=2)
    found = end_of_backward(graph, plan, MIXED)
    held = state_bytes(found) - (found.gathered_parameters if zero == 3 else 0)
    formula = {0: 16 * psi, 1: 4 * psi + 12 * psi // 64, 2: 2 * psi + 14 * psi // 64, 3: 16 * psi // 64}
    assert held == formula[zero]
    assert held / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("recipe", "bytes_per_parameter"),
    [
        (MIXED, 16),
        (msgspec.structs.replace(MIXED, system=msgspec.structs.replace(MASTERS, gradient_item_bytes=6)), 20),
        (ADAM, 16),
        (msgspec.structs.replace(ADAM, optimizer_slots=1), 12),
        (msgspec.structs.replace(ADAM, optimizer_slots=0), 8),
    ],
)
def test_the_recipe_decides_the_state(recipe: Recipe, bytes_per_parameter: int) -> None:
    graph = chain_graph(4, (64, 8))
    assert state_bytes(end_of_backward(graph, flat_plan(graph), recipe)) == bytes_per_parameter * PSI


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
    plan = flat_plan(graph, 2, zero=2, precision="fp64", num_microbatches=2)
    assert state_bytes(end_of_backward(graph, plan)) == 8 * PSI + 32 * PSI // 2


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


@quick
@given(graphs, st.sampled_from([1, 2, 3]), degrees)
def test_more_ranks_never_hold_more_state(graph: Graph, zero: int, num_microbatches: int) -> None:
    held = []
    for num_ranks in (1, 2, 4, 8):
        parts = end_of_backward(graph, flat_plan(graph, num_ranks, zero=zero, num_microbatches=num_microbatches))
        held.append(parts.parameters + parts.gradients + parts.optimizer_state)
    assert held == sorted(held, reverse=True)


def test_hybrid_shards_over_its_group_only() -> None:
    graph = chain_graph(4, (64, 8))
    parts = end_of_backward(graph, flat_plan(graph, 8, zero=3, hybrid=2, num_microbatches=2))
    assert state_bytes(parts) - parts.gathered_parameters == 16 * PSI // 2


# Activations of one microbatch


def test_activations_pile_up_in_forward() -> None:
    graph, n = chain_graph(4), 3
    found = parts_of(graph, flat_plan(graph, microbatch=n))
    assert [parts.activations for parts in found[:-1]] == [n * KEPT * live for live in (0, 1, 2, 3, 4, 3, 2, 1)]
    assert {parts.temporaries for parts in found[:4]} == {n * (KEPT + PEAK)}, "what it keeps, and a moment's room"
    assert {parts.temporaries for parts in found[4:8]} == {n * PEAK}


def test_a_recomputed_block_keeps_its_output_and_rebuilds_the_rest() -> None:
    graph, n = chain_graph(4), 3
    found = parts_of(graph, flat_plan(graph, microbatch=n, recompute="full"))
    kept = [n * OUTPUT * live for live in (0, 1, 2, 3, 4, 3, 2, 1)]
    rebuilt = [0] * 4 + [n * (KEPT - OUTPUT)] * 4
    assert [parts.activations for parts in found[:-1]] == [sum(pair) for pair in zip(kept, rebuilt, strict=True)]
    assert {parts.temporaries for parts in found[4:8]} == {n * PEAK}


def test_the_batch_of_all_microbatches_is_held() -> None:
    graph = chain_graph(4)
    assert end_of_backward(graph, flat_plan(graph, microbatch=2, num_microbatches=3)).inputs == 6 * 64


@pytest.mark.parametrize(("kind", "room"), [("cuda", 4 * PSI // 2), ("cpu", 2 * 4 * 512 // 2)])
def test_the_update_is_a_moment_too(kind: str, room: int) -> None:
    graph = chain_graph(4, (64, 8))
    plan, device = flat_plan(graph, 2, zero=1), msgspec.structs.replace(DEVICE, kind=kind)
    update = walk(graph, plan, msgspec.structs.replace(ADAM, fused_update=False), device)[-1]
    assert update.when == "update"
    assert (update.memory.temporaries, update.memory.activations, update.memory.gathered_parameters) == (room, 0, 0)
    fused = walk(graph, plan, msgspec.structs.replace(ADAM, fused_update=True), device)[-1]
    assert fused.memory.temporaries == (0 if kind == "cuda" else room)


def kept_by_a_block(sizes: Sizes, microbatch: int = 1, recipe: Recipe = ADAM, **request: Any) -> float:
    graph = transformer_graph(sizes)
    plan = plan_for(graph, microbatch=microbatch, **request)
    return Footprints(plan, recipe).of(make_local_blocks(graph, plan)["blocks.0"], "blocks.0", 0).kept


LARGE = Sizes(hidden=512, heads=8, seq=256, attention="eager", dropout=True)
S, H, A = LARGE.seq, LARGE.hidden, LARGE.heads


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikantis_formulas(t: int, samples: int) -> None:
    """2205.05198, equations 1, 2 and 4: tp alone, and with sequence parallel; bytes a block and microbatch."""
    sbh, scores = S * samples * H, 5 * A * S / H
    plain = kept_by_a_block(LARGE, samples)
    assert plain == pytest.approx(sbh * (34 + scores))
    if t > 1:
        assert kept_by_a_block(LARGE, samples, tp=t) == pytest.approx(sbh * (10 + 24 / t + scores / t))
        assert kept_by_a_block(LARGE, samples, tp=t, sequence_parallel=True) == pytest.approx(plain / t)


@pytest.mark.parametrize("t", [1, 8])
def test_selective_recompute_does_without_the_scores(t: int) -> None:
    """Equation 6: 34 s b h / t. What the core hands to the projection is kept, since the projection needs it."""
    found = kept_by_a_block(LARGE, tp=t, sequence_parallel=t > 1, recompute="selective")
    assert found == pytest.approx(S * H * 34 / t)


@pytest.mark.parametrize("t", [1, 8])
def test_full_recompute_keeps_the_input(t: int) -> None:
    assert kept_by_a_block(LARGE, tp=t, recompute="full") == 2 * S * H
    if t > 1:
        assert kept_by_a_block(LARGE, tp=t, sequence_parallel=True, recompute="full") == 2 * S * H / t


def test_selective_recompute_of_fused_attention_frees_nothing() -> None:
    sizes = Sizes(hidden=512, heads=8, seq=256)
    assert kept_by_a_block(sizes, recompute="selective") == kept_by_a_block(sizes)


def test_without_dropout_there_are_no_masks() -> None:
    """34 loses its two masks; the scores keep the softmax alone, 2 of 5."""
    sizes = Sizes(hidden=512, heads=8, seq=256, attention="eager")
    assert kept_by_a_block(sizes) == pytest.approx(S * H * (32 + 2 * A * S / H))


def test_fused_attention_keeps_no_scores() -> None:
    assert kept_by_a_block(Sizes(hidden=512, heads=8, seq=256)) == pytest.approx(S * H * 32)


@pytest.mark.parametrize("cp", [2, 4])
def test_cp_divides_what_a_block_keeps(cp: int) -> None:
    sizes = Sizes(hidden=512, heads=8, seq=256)
    assert kept_by_a_block(sizes, cp=cp) == pytest.approx(kept_by_a_block(sizes) / cp)


recompute_order = ["full", "selective", "none"]
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero": 3}, {"pp": 2}]
CASES = [*((attention, layout) for attention in ("fused", "eager") for layout in LAYOUTS), ("fused", {"cp": 2})]
"""Only fused attention runs under cp."""


@pytest.mark.parametrize(("attention", "layout"), CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_trades_memory_for_time(attention: str, layout: dict[str, Any], compiled: bool) -> None:
    graph = transformer_graph(layers=4, hidden=512, heads=8, seq=256, attention=attention, dropout=attention == "eager")
    found = [
        estimate(
            graph,
            plan_for(
                graph, **layout, recompute=mode, compile=compiled, microbatch=64, global_batch=64 * layout.get("dp", 1)
            ),
            named_machine(),
            Recipe(fused_update=True),
        )
        for mode in recompute_order
    ]
    peaks = [cost.peak_bytes for cost in found]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    assert [cost.step_seconds for cost in found] == sorted((cost.step_seconds for cost in found), reverse=True)


# Schedules


def activations(graph: Graph, coordinate: int, **request: Any) -> float:
    plan = plan_for(graph, **request)
    return max(parts.activations for parts in parts_of(graph, plan, coordinate=coordinate))


@pytest.mark.parametrize("num_microbatches", [4, 8, 16])
def test_gpipe_keeps_all_microbatches_and_1f1b_at_most_one_a_stage(num_microbatches: int) -> None:
    """At the last backward of a full pipeline all are held; p - c of them on coordinate c of 1F1B. A stage after the
    first also holds what each microbatch sent it, one before the last the gradient that came back for the one at hand."""
    graph, p = chain_graph(4), 4
    common = {"pp": p, "microbatch": 1, "global_batch": num_microbatches}
    for coordinate in range(p):
        one, gradient = KEPT + (OUTPUT if coordinate else 0), OUTPUT if coordinate < p - 1 else 0
        assert activations(graph, coordinate, schedule="gpipe", **common) == one * num_microbatches + gradient
        assert activations(graph, coordinate, schedule="1f1b", **common) == one * (p - coordinate) + gradient


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_a_stage_gives_back_all_but_what_it_sends(layout: dict[str, Any], recompute: str) -> None:
    """After the last pass of a microbatch: the activation it sent, held until its backward is done, and the gradient."""
    graph = transformer_graph(layers=3)
    plan = plan_for(graph, pp=3, recompute=recompute, **layout)
    cost, local_blocks = memory_cost(graph, plan), make_local_blocks(graph, plan)
    stream = 2 * 32 * 64 // (2 if "sequence_parallel" in layout else 1)
    for where, passes in enumerate(passes_by_stage(graph, plan)):
        *_, last, _update = walk(graph, plan, coordinate=where)
        segment = passes.backward[-1]
        footprint = cost.footprints.of(local_blocks[segment.block], segment.block, segment.number)
        left = last.memory.activations - footprint.rebuilt + footprint.kept
        assert left == pytest.approx(stream * ((where < 2) + (where > 0))), where


def test_what_a_stage_received_may_be_held_twice() -> None:
    graph = chain_graph(4)
    plan = plan_for(graph, pp=2, microbatch=1, global_batch=4, schedule="gpipe")
    once, twice = (
        max(parts.activations for parts in parts_of(graph, plan, recipe, coordinate=1))
        for recipe in (ADAM, msgspec.structs.replace(ADAM, system=TrainingSystem(copies_received=True)))
    )
    assert (once, twice) == (4 * (2 * KEPT + OUTPUT), 4 * (2 * KEPT + 2 * OUTPUT))


def test_few_microbatches_fill_no_pipeline() -> None:
    graph = chain_graph(4)
    assert activations(graph, 0, schedule="1f1b", pp=4, microbatch=1, global_batch=2) == 2 * KEPT + OUTPUT


@pytest.mark.parametrize("virtual", [2, 4])
def test_interleaving_holds_more_than_1f1b_and_less_than_twice(virtual: int) -> None:
    """Megatron: p + (p-1)/v microbatches' worth, (1 + (p-1)/(pv)) times 1F1B, on the first coordinate.

    That is pv + p - 1 microbatches of single stages, and the one at hand; those of the first stage, p at least, received
    nothing.
    """
    p, graph = 4, chain_graph(16)
    common = {"pp": p, "microbatch": 1, "global_batch": 16}
    plain = activations(graph, 0, schedule="1f1b", **common)
    found = activations(graph, 0, schedule="interleaved", virtual=virtual, **common)
    assert plain == 4 * p * KEPT + OUTPUT
    stage = 16 // (p * virtual) * KEPT
    assert plain < found <= (p * virtual + p) * stage + p * virtual * OUTPUT + OUTPUT


def inputs_of(pp: int, cp: int = 1, **request: Any) -> list[int]:
    graph = transformer_graph(layers=4)
    plan = plan_for(graph, pp=pp, cp=cp, microbatch=1, global_batch=4, **request)
    return [parts_of(graph, plan, coordinate=where)[0].inputs for where in range(pp)]


def test_the_first_stage_holds_what_the_model_reads_and_the_last_the_labels() -> None:
    whole = 4 * 16 * 32
    assert inputs_of(1) == [whole]
    assert inputs_of(2) == [whole // 2, whole // 2]
    assert inputs_of(4) == [whole // 2, 0, 0, whole // 2]
    assert inputs_of(2, schedule="zbv") == [whole, 0], "a V ends where it begins"
    assert inputs_of(2, cp=2) == [whole // 4, whole // 4]


# All together


@quick
@given(plans_of, machines)
def test_memory_parts_add_up_to_the_largest_moment(case: tuple[Graph, Plan], cluster: Cluster) -> None:
    graph, plan = case
    found = estimate(graph, plan, machine(4, kind=cluster.device.kind))
    moments = walk(graph, plan, Recipe(), cluster.device)
    fullest = max(moments, key=lambda moment: moment.memory.total)
    assert found.peak_bytes == found.memory_bytes.total == fullest.memory.total
    assert found.worst_moment == fullest.when
    assert min(msgspec.structs.astuple(found.memory_bytes)) >= 0


@pytest.mark.parametrize(("attention", "layout"), CASES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_part_is_ever_negative(layout: dict[str, Any], recompute: str, attention: str) -> None:
    graph = transformer_graph(attention=attention, dropout=True)
    for compiled in (False, True):
        plan = plan_for(graph, **layout, recompute=recompute, compile=compiled, microbatch=2)
        for coordinate in range(plan.mesh.pp):
            for moment in walk(graph, plan, coordinate=coordinate):
                assert min(msgspec.structs.astuple(moment.memory)) >= 0, (moment.when, compiled)


def test_the_worst_coordinate_and_its_moment_are_named() -> None:
    """Logits are the largest tensors: the last coordinate is fullest in the loss."""
    graph = transformer_graph(layers=2, vocab=65536)
    found = estimate(graph, plan_for(graph, pp=2, dp=2, microbatch=8, global_batch=16), named_machine(8))
    assert found.worst_rank == 2, "the first rank of the second coordinate"
    assert found.worst_moment == "backward of what is outside the blocks"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_input_that_is_given_back_outside_the_blocks(recompute: str) -> None:
    """Blocks that save a copy of their own: their input goes right behind them, unless a recompute needs it again."""
    graph = chain_graph(4)
    root, block = graph.kinds
    freed = Pass(phase="forward", events=(MemoryEvent("@input", Affine(0.0, -OUTPUT)),))
    names = graph.repeated_blocks
    forward = [step for name in names for step in (Segment(name, 0), *([Segment("", 0)] if name != names[0] else []))]
    kinds = (msgspec.structs.replace(root, passes=(freed,)), block)
    behind = msgspec.structs.replace(
        graph, kinds=kinds, timeline=(*forward, *(Segment(name, 1) for name in reversed(names)))
    )
    found = [moment.memory for moment in walk(behind, plan_for(behind, recompute=recompute))]
    assert all(parts.activations >= 0 for parts in found)
    at_the_end = found[len(forward)].activations
    kept = KEPT * 4 - OUTPUT * 3 if recompute == "none" else OUTPUT * 4 + KEPT - OUTPUT
    assert at_the_end == kept
