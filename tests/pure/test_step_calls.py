"""Which collectives a rank calls for the state. Ψ: parameters, N: ranks, m: microbatches; bytes are the input tensor's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import chain_graph, flat_plan, graphs, machine, plan_for
from strategies import divisors, quick
from test_experts import GRAPH as EXPERTS
from transformer import Sizes, transformer_graph

from meshwright.core.collective import COUNT_BYTES, FLAG_BYTES, LOSS_BYTES, NORM_BYTES
from meshwright.core.graph import Graph, Kind, Parameter
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe, TrainingSystem
from meshwright.cost.communication.links import Call, Group
from meshwright.cost.communication.step_calls import bucket_bytes, step_calls
from meshwright.cost.estimate import estimate
from meshwright.cost.memory.local_parameters import groups_of, local_parameters, total_elements
from meshwright.rules.groups import BUCKET_BYTES, FIRST_BUCKET_BYTES

PSI = 4 * 64 * 8
"""Parameters of `chain_graph(4, (64, 8))`, which every power of two up to 64 divides."""


def calls(graph: Graph, plan: Plan, recipe: Recipe | None = None, coordinate: int = 0) -> list[Call]:
    """Without fp16's flag, which has a test of its own."""
    found = step_calls(graph, plan, recipe or Recipe(), coordinate)
    return [call for call in found if call.phase != "other" or call.num_bytes != FLAG_BYTES]


def state_calls(graph: Graph, plan: Plan, recipe: Recipe | None = None) -> list[Call]:
    return [call for call in calls(graph, plan, recipe) if call.phase != "other"]


# dp: the ZeRO paper's traffic


def moved_values(graph: Graph, plan: Plan, recipe: Recipe | None = None) -> float:
    """Values each rank sends in a step, counted as N/(N-1) of what a ring sends: the ZeRO paper's count."""
    times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": plan.mesh.dp}
    system = (recipe or Recipe()).system
    item = system.gather_item_bytes or (2 if plan.precision == "bf16" else 4)
    reduced = system.gradient_item_bytes or 4
    items = {"all_gather": item, "all_reduce": reduced, "reduce_scatter": reduced}
    return sum(
        call.count * times[call.kind] * call.num_bytes / items[call.kind] for call in state_calls(graph, plan, recipe)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 4, 64])
@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_of_a_step(zero: int, passes: int, num_ranks: int, precision: str) -> None:
    graph = chain_graph(4, (64, 8))
    assert moved_values(graph, flat_plan(graph, num_ranks, zero=zero, precision=precision)) == passes * PSI


@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_in_sixteen_bits(zero: int, passes: int) -> None:
    graph = chain_graph(4, (64, 8))
    recipe = Recipe(system=TrainingSystem(parameter_item_bytes=2, gradient_item_bytes=2, master_item_bytes=4))
    assert moved_values(graph, flat_plan(graph, 64, zero=zero, precision="bf16"), recipe) == passes * PSI


@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 1 + 3), (3, 3 * 3)])
def test_traffic_of_three_microbatches(zero: int, passes: int) -> None:
    graph = chain_graph(4, (64, 8))
    assert moved_values(graph, flat_plan(graph, 4, zero=zero, num_microbatches=3)) == passes * PSI


def test_what_lies_outside_the_blocks_stays_gathered_from_forward_to_backward() -> None:
    graph = chain_graph(4, (64, 8), outside=(64, 100))
    assert moved_values(graph, flat_plan(graph, 4, zero=3)) == 3 * PSI + 2 * 6400


def test_zero_1_that_reduces_whole_gradients() -> None:
    """DeepSpeed's pipelines: an all-reduce and a gather, 3Ψ, both after backward."""
    graph = chain_graph(4, (64, 8))
    found = state_calls(graph, flat_plan(graph, 4, zero=1), Recipe(system=TrainingSystem(reduces_whole=True)))
    assert [(call.kind, call.num_bytes, call.phase) for call in found] == [
        ("all_reduce", 4 * PSI, "update"),
        ("all_gather", 4 * PSI // 4, "update"),
    ]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_shards_inside_a_group_and_adds_up_across(zero: int) -> None:
    graph = chain_graph(1, (64, 8))
    found = state_calls(graph, flat_plan(graph, 8, zero=zero, hybrid=2))
    inner = {call.group for call in found if call.kind in ("all_gather", "reduce_scatter")}
    (outer,) = [call for call in found if call.kind == "all_reduce"]
    assert inner == {Group(2, 1)}
    assert (outer.group, outer.num_bytes) == (Group(4, 2), 4 * 64 * 8 // 2)


def test_padding_travels_too() -> None:
    graph = chain_graph(1, (5, 3))
    gather, reduce = state_calls(graph, flat_plan(graph, 4, zero=2))
    assert (gather.kind, gather.num_bytes) == ("all_gather", 2 * 3 * 4)
    assert (reduce.kind, reduce.num_bytes) == ("reduce_scatter", 4 * 2 * 3 * 4)


def frozen(graph: Graph) -> Graph:
    first, *others = graph.parameters
    return msgspec.structs.replace(graph, parameters=(msgspec.structs.replace(first, trainable=False), *others))


@pytest.mark.parametrize("zero", [0, 2])
def test_a_frozen_parameter_is_not_reduced(zero: int) -> None:
    graph = frozen(chain_graph(4, (64, 8)))
    found = state_calls(graph, flat_plan(graph, 2, zero=zero))
    assert sum(call.num_bytes for call in found if "reduce" in call.kind) == 4 * (PSI - 512)


def test_one_device_calls_nothing() -> None:
    graph = chain_graph()
    found = estimate(graph, flat_plan(graph), machine(1))
    assert found.collectives == ()
    assert (found.time_seconds.exposed_gather, found.time_seconds.exposed_reduce, found.time_seconds.other) == (0, 0, 0)


def test_ranks_count_tokens_and_add_up_the_loss() -> None:
    graph = chain_graph()
    small = [call.num_bytes for call in calls(graph, flat_plan(graph, 2)) if call.phase == "other"]
    assert small == [COUNT_BYTES, LOSS_BYTES]


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ({}, []),
        ({"zero": 1}, []),
        ({"dp": 2}, []),
        ({"dp": 2, "zero": 1}, ["dp"]),
        ({"tp": 2}, ["tp"]),
        ({"cp": 2}, []),
        ({"tp": 2, "pp": 2, "dp": 2, "zero": 1}, ["dp", "tp", "pp"]),
    ],
)
def test_clipping_adds_up_one_number_over_every_axis_that_divides_gradients(
    layout: dict[str, Any], axes: list[str]
) -> None:
    graph = transformer_graph()
    plan = plan_for(graph, **layout, global_batch=4)
    more = calls(graph, plan, Recipe(clips=True))[len(calls(graph, plan)) :]
    assert [(call.kind, call.num_bytes, call.axis) for call in more] == [("all_reduce", NORM_BYTES, a) for a in axes]


def test_clipping_adds_up_over_the_ranks_that_share_a_gradient() -> None:
    graph = chain_graph()
    (*_, norm) = calls(graph, flat_plan(graph, 8, zero=2, hybrid=4), Recipe(clips=True))
    assert norm.group == Group(4, 1)
    (*_, norm) = calls(EXPERTS, plan_for(EXPERTS, dp=4, ep=2, global_batch=4), Recipe(clips=True))
    assert (norm.axis, norm.group) == ("ep", Group(2, 1))


def test_tp_leaves_less_to_reduce() -> None:
    """Each dp rank reduces what it holds: split tensors are 1/tp."""
    graph = transformer_graph(hidden=64, seq=32, vocab=2048, layers=1)
    whole, split = (
        sum(call.num_bytes for call in state_calls(graph, plan_for(graph, dp=2, tp=tp, precision="fp16")))
        for tp in (1, 4)
    )
    kept_whole = 4 * (32 * 64 + 4 * 64 + 2 * 64 + 2 * 64)  # positions, the block's norms, rows' biases, the last norm
    assert split == (whole - kept_whole) // 4 + kept_whole


def test_each_pp_coordinate_moves_its_own_parameters() -> None:
    graph = chain_graph(4, (64, 8), outside=(64, 100))
    plan = plan_for(graph, pp=2, dp=2, zero=3, global_batch=2)
    moved = [sum(c.num_bytes for c in calls(graph, plan, None, where) if c.phase == "forward") for where in (0, 1)]
    assert moved == [4 * (PSI // 2 + 6400) // 2, 4 * PSI // 2 // 2]


@pytest.mark.parametrize("zero", [0, 1])
def test_a_tied_head_is_reduced_on_its_own_coordinate_too(zero: int) -> None:
    graph = transformer_graph(tied=True)
    plan = plan_for(graph, pp=2, dp=2, zero=zero, global_batch=2)
    for where in (0, 1):
        elements = total_elements(local_parameters(graph, plan, where))
        found = [call for call in calls(graph, plan, None, where) if call.phase == "backward"]
        assert sum(call.num_bytes for call in found) == 4 * elements


# cp, tp and pp


@pytest.mark.parametrize(("dp", "cp", "tp"), [(2, 2, 1), (1, 4, 1), (2, 2, 2)])
def test_replicas_along_cp_reduce_too(dp: int, cp: int, tp: int) -> None:
    """One group of all that hold the same parameters: neighbours, but for tp between them. The tokens' count and the loss
    are whole along cp already: they are added up over dp alone, ranks that lie cp · tp apart."""
    graph = transformer_graph()
    found = calls(graph, plan_for(graph, dp=dp, cp=cp, tp=tp, global_batch=dp))
    gradients = [call for call in found if call.phase == "backward"]
    numbers = [call for call in found if call.phase == "other"]
    assert len(found) == len(gradients) + len(numbers)
    assert {call.axis for call in found} == {"dp"}
    assert {call.group for call in gradients} == {Group(dp * cp, tp)}
    expected = [(COUNT_BYTES, Group(dp, cp * tp)), (LOSS_BYTES, Group(dp, cp * tp))] if dp > 1 else []
    assert [(call.num_bytes, call.group) for call in numbers] == expected
    alone = calls(graph, plan_for(graph, dp=dp * cp, tp=tp, global_batch=dp * cp))
    assert gradients == [call for call in alone if call.phase == "backward"], "the same calls as that many dp ranks"


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("dp", "cp"), [(2, 2), (1, 4), (1, 2)])
def test_zero_shards_over_dp_and_cp(zero: int, dp: int, cp: int) -> None:
    """Their ranks are neighbours: each has 1/(dp · cp) of the one fp32 matrix of 64 · 8, and nobody has the same shard."""
    graph = chain_graph(1, (64, 8))
    found = state_calls(graph, plan_for(graph, dp=dp, cp=cp, zero=zero, global_batch=dp))
    assert {call.group for call in found} == {Group(dp * cp, 1)}
    gather = ("all_gather", 4 * 64 * 8 // (dp * cp))
    scatter = ("reduce_scatter", 4 * 64 * 8)
    gathers = [gather] * (2 if zero == 3 else 1)
    assert [(call.kind, call.num_bytes) for call in found] == [*gathers, scatter]


def test_shards_are_added_up_along_cp_and_across_hybrid_groups() -> None:
    graph = chain_graph(1, (64, 8))
    found = state_calls(graph, plan_for(graph, dp=4, cp=2, zero=3, hybrid=2, global_batch=4))
    (outer,) = [call for call in found if call.kind == "all_reduce"]
    assert (outer.group.size, outer.num_bytes) == (2 * 2, 4 * 64 * 8 // 2)


@pytest.mark.parametrize(("layout", "shards"), [({}, 1), ({"tp": 2}, 2), ({"dp": 2, "zero": 2}, 2)])
def test_a_tied_table_is_added_up_between_the_ends_of_the_pipeline(layout: dict[str, Any], shards: int) -> None:
    sizes = Sizes(tied=True, layers=4)
    graph = transformer_graph(sizes)
    plan = plan_for(graph, pp=4, **layout, global_batch=4)
    size = 4 * sizes.vocab * sizes.hidden // shards
    found = [between_stages(graph, plan, where) for where in range(4)]
    once = Call("all_reduce", size, 1, "other", "pp", Group(2, 3 * plan.world // 4))
    assert found == [[once], [], [], [once]]


def between_stages(graph: Graph, plan: Plan, coordinate: int) -> list[Call]:
    """Along pp, without the loss, which the last stage tells the others."""
    found = [call for call in calls(graph, plan, None, coordinate) if call.axis == "pp"]
    assert [call.num_bytes for call in found].count(LOSS_BYTES) == 1
    return [call for call in found if call.num_bytes != LOSS_BYTES]


def test_a_tied_table_on_one_coordinate_is_not_sent() -> None:
    """A V ends where it begins; a table that is not trained has no gradient."""
    graph = transformer_graph(tied=True, layers=4)
    folded = plan_for(graph, pp=2, schedule="zbv", global_batch=4)
    fixed = tuple(msgspec.structs.replace(p, trainable="weight" not in p.name) for p in graph.parameters)
    untrained = msgspec.structs.replace(graph, parameters=fixed)
    for model, plan in ((graph, folded), (untrained, plan_for(graph, pp=2, global_batch=4))):
        assert [call for where in (0, 1) for call in between_stages(model, plan, where)] == []


def test_sequence_parallel_adds_up_gradients_of_whole_tensors() -> None:
    """Of a block its two norms and the biases of two rows, positions, and the last norm: each rank saw its tokens only."""
    graph = transformer_graph(hidden=64, seq=32, layers=3)
    plain, split = (plan_for(graph, tp=2, sequence_parallel=on) for on in (False, True))
    assert calls(graph, plain) == []
    whole = 3 * (2 * 2 + 2) * 64 + 32 * 64 + 2 * 64
    assert calls(graph, split) == [Call("all_reduce", 4 * whole, 1, "other", "tp", Group(2))]


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ({"dp": 2}, []),
        ({"dp": 2, "zero": 2}, ["dp"]),
        ({"dp": 2, "zero": 1, "tp": 2, "pp": 2}, ["dp", "tp", "pp"]),
        ({"tp": 2}, ["tp"]),
    ],
)
def test_in_fp16_ranks_that_divide_gradients_agree_whether_they_are_finite(
    layout: dict[str, Any], axes: list[str]
) -> None:
    graph = transformer_graph(layers=4)
    for precision in ("fp16", "bf16"):
        plan = plan_for(graph, **layout, precision=precision, global_batch=2)
        found = [call for call in step_calls(graph, plan, Recipe(), 0) if call.num_bytes == FLAG_BYTES]
        assert [call.axis for call in found] == (axes if precision == "fp16" else [])
        assert {call.kind for call in found} <= {"all_reduce"}


def test_a_table_that_every_rank_looks_up_whole_is_not_added_up() -> None:
    """Positions that the model counts itself, not given in the batch: each rank's gradient of them is whole."""
    graph = counting_positions(transformer_graph(hidden=64, seq=32, layers=3))
    plan = plan_for(graph, tp=2, sequence_parallel=True)
    whole = 3 * (2 * 2 + 2) * 64 + 2 * 64
    assert calls(graph, plan) == [Call("all_reduce", 4 * whole, 1, "other", "tp", Group(2))]


def counting_positions(graph: Graph) -> Graph:
    """The graph with its positions counted in block ''."""

    def counted(kind: Kind) -> Kind:
        ops = tuple(
            msgspec.structs.replace(op, inputs=("weight", "@#0")) if op.phase == "forward" else op for op in kind.ops
        )
        return msgspec.structs.replace(kind, ops=ops)

    home = graph.kind_by_block["position_embedding"]
    kinds = tuple(counted(kind) if kind is home else kind for kind in graph.kinds)
    return msgspec.structs.replace(graph, kinds=kinds)


@quick
@given(graphs, divisors(4))
def test_groups_hold_every_parameter_once(graph: Graph, dp: int) -> None:
    groups = groups_of(graph.parameters, flat_plan(graph, dp, zero=min(dp - 1, 3)))
    assert sum(total_elements(group) for group in groups.values()) == graph.num_parameters
    assert all(groups.values())


# Buckets


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
