"""Which collectives a rank calls inside the blocks and between the stages; bytes are the input tensor's."""

from __future__ import annotations

from typing import Any

import pytest
from machines import named_machine, plan_for
from transformer import Sizes, transformer_graph

from meshwright.core.graph import Graph
from meshwright.core.plan import Mesh
from meshwright.core.recipe import Recipe, TrainingSystem
from meshwright.cost.communication.block_calls import block_calls
from meshwright.cost.estimate import estimate
from meshwright.cost.local_block import make_local_blocks
from meshwright.cost.passes import passes_by_stage, transfer_calls

# Inside the blocks


def inner(graph: Graph, block: str = "blocks.0", **request: Any) -> dict[str, list[tuple[str, int]]]:
    """Phase → kind and bytes of each call of one block and microbatch."""
    plan = plan_for(graph, **request)
    local_block = make_local_blocks(graph, plan)[block]
    return {
        phase: [
            (call.kind, call.num_bytes) for call in block_calls(local_block, plan, phase) for _ in range(call.count)
        ]
        for phase in ("forward", "backward")
    }


SIZES = Sizes(seq=32, hidden=64)
STREAM = 32 * 64 * 2
"""Bytes of one sample's activation between the blocks."""


@pytest.mark.parametrize("microbatch", [1, 3])
def test_a_block_under_tp_adds_up_twice_each_way(microbatch: int) -> None:
    found = inner(transformer_graph(SIZES), tp=2, microbatch=microbatch)
    assert found == {phase: [("all_reduce", microbatch * STREAM)] * 2 for phase in ("forward", "backward")}


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel_gathers_and_scatters_instead(tp: int) -> None:
    """A gather is given the shard a rank has, a reduce-scatter the whole sum: together an all-reduce's traffic.

    What the columns read is kept as a shard, a tp-th of the memory: backward gathers it again.
    """
    graph = transformer_graph(SIZES)
    found = inner(graph, tp=tp, sequence_parallel=True)
    gather, scatter = ("all_gather", STREAM // tp), ("reduce_scatter", STREAM)
    assert found == {"forward": [gather] * 2 + [scatter] * 2, "backward": [gather] * 4 + [scatter] * 2}
    local_block = make_local_blocks(graph, plan_for(graph, tp=tp, sequence_parallel=True))["blocks.0"]
    assert local_block.kind.ops[0].name == "native_layer_norm"
    assert local_block.result_share(0) == 1 / tp, "memory counts a shard of what the columns read"


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "cp": 2}])
def test_a_loss_over_a_split_vocabulary_adds_up_three_numbers_a_token(layout: dict[str, Any]) -> None:
    """Sequence parallel ends before the head, which sees all tokens; cp does not: the sum over its tokens is added up, one
    number of fp32, and so is the gradient of that sum."""
    found = inner(transformer_graph(SIZES), "", microbatch=3, **layout)
    cp = layout.get("cp", 1)
    over_cp = [("all_reduce", 4)] if cp > 1 else []
    assert found == {"forward": [("all_reduce", 4 * 3 * 32 // cp)] * 3 + over_cp, "backward": over_cp}


def test_a_loss_over_a_whole_vocabulary_adds_up_nothing() -> None:
    graph = transformer_graph(vocab=512, attention="eager")
    assert inner(graph, "", tp=2) == {"forward": [], "backward": []}


def test_the_vocabulary_under_tp() -> None:
    graph = transformer_graph(SIZES)
    assert inner(graph, "token_embedding", tp=2) == {"forward": [("all_reduce", STREAM)], "backward": []}
    assert inner(graph, "head", tp=2) == {"forward": [], "backward": [("all_reduce", STREAM)]}
    assert inner(graph, "position_embedding", tp=2) == inner(graph, "norm", tp=2) == {"forward": [], "backward": []}


def test_the_bytes_of_tp_do_not_depend_on_how_attention_runs() -> None:
    fused, eager = (
        inner(transformer_graph(attention=attention, dropout=True), tp=2) for attention in ("fused", "eager")
    )
    assert fused == eager


@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("cp", [2, 4])
def test_cp_exchanges_tokens_for_heads_and_back(attention: str, cp: int) -> None:
    """Each rank gives its tokens of query, key and value, all heads, and later its heads of the result, all tokens. Of all
    four it holds 1/cp; their gradients go the other way. It is the same where the model multiplies them itself."""
    found = inner(transformer_graph(seq=32, hidden=64, attention=attention), cp=cp)
    assert found == {phase: [("all_to_all", STREAM // cp)] * 4 for phase in ("forward", "backward")}


@pytest.mark.parametrize("cp", [2, 4])
def test_in_a_ring_keys_and_values_go_round_and_their_gradients_come_home(cp: int) -> None:
    """In bf16 the gradients are added up in fp32."""
    found = inner(transformer_graph(seq=32, hidden=64, attention="fused"), cp=cp, context="ring")
    message = ("send", 2 * STREAM // cp)
    assert found["forward"] == [message] * (cp - 1)
    assert found["backward"] == [message] * (cp - 1) + [("send", 4 * STREAM // cp)] * cp


def test_in_a_ring_explicit_attention_gathers_keys_and_values() -> None:
    found = inner(transformer_graph(seq=32, hidden=64, attention="eager"), cp=4, context="ring")
    assert found == {
        "forward": [("all_gather", STREAM // 4)] * 2,
        "backward": [("reduce_scatter", STREAM)] * 2,
    }


def test_cp_beside_tp_exchanges_the_heads_a_rank_has() -> None:
    """Sums over tp are of 1/cp of the tokens; what attention reads and makes is 1/cp of the tokens of 1/tp of the heads."""
    found = inner(transformer_graph(SIZES), cp=2, tp=2)
    each_way = [("all_reduce", STREAM // 2)] * 2 + [("all_to_all", STREAM // 4)] * 4
    assert found == {"forward": each_way, "backward": each_way}


def test_the_tokens_of_a_loss_over_a_whole_vocabulary_are_added_up_along_cp() -> None:
    found = inner(transformer_graph(SIZES), "", cp=2)
    assert found == {"forward": [("all_reduce", 4)], "backward": [("all_reduce", 4)]}


def test_a_block_alone_calls_nothing() -> None:
    assert inner(transformer_graph(SIZES), dp=2, global_batch=2) == {"forward": [], "backward": []}


def collectives(graph: Graph, **request: Any) -> dict[tuple[str, str], tuple[int, int]]:
    found = estimate(graph, plan_for(graph, **request), named_machine(8)).collectives
    return {(row.kind, row.axis): (row.count, row.total_bytes) for row in found}


@pytest.mark.parametrize(("recompute", "redone"), [("none", 0), ("selective", 0), ("full", 1)])
def test_a_step_of_a_transformer_under_tp(recompute: str, redone: int) -> None:
    """Two all-reduces each way a block and microbatch; under full recompute attention's once more, which the norm after it
    keeps, but not the MLP's: only the next block reads that. One of the table of tokens, one of the head, and the three
    small ones of the loss."""
    graph = transformer_graph(layers=3, seq=32, hidden=64, precision="bf16")
    found = collectives(graph, precision="bf16", tp=2, global_batch=4, microbatch=1, recompute=recompute)
    count = 4 * (3 * (2 + 2 + redone) + 2)
    assert found == {("all_reduce", "tp"): (count + 4 * 3, count * STREAM + 4 * 3 * 4 * 32)}


def test_axes_are_told_apart() -> None:
    found = collectives(transformer_graph(), tp=2, dp=2, cp=2, zero=3, global_batch=2)
    assert {axis for _, axis in found} == {"tp", "dp", "cp"}


def test_mesh_degrees_of_one_make_no_calls() -> None:
    graph = transformer_graph()
    plan = plan_for(graph)
    assert plan.mesh == Mesh()
    assert [block_calls(local_block, plan, "forward") for local_block in make_local_blocks(graph, plan).values()] == [
        ()
    ] * 7


# Between the stages


def sends(graph: Graph, recipe: Recipe | None = None, **request: Any) -> list[list[tuple[str, str, str, int, int]]]:
    """By coordinate: kind, axis, phase, count and bytes."""
    plan = plan_for(graph, microbatch=1, global_batch=4, **request)
    passes, local_blocks = passes_by_stage(graph, plan), make_local_blocks(graph, plan)
    return [
        [
            (call.kind, call.axis, call.phase, call.count, call.num_bytes)
            for call in transfer_calls(plan, passes, local_blocks, recipe or Recipe(), coordinate)
        ]
        for coordinate in range(plan.mesh.pp)
    ]


GO, BACK = ("send", "pp", "forward", 4, STREAM), ("send", "pp", "backward", 4, STREAM)
LONG = transformer_graph(layers=4, seq=32, hidden=64)


def test_each_microbatch_goes_to_the_next_stage_and_its_gradient_comes_back() -> None:
    assert sends(LONG, pp=3) == [[GO], [BACK, GO], [BACK]]
    assert sends(LONG) == [[]]


def test_interleaved_stages_send_round_the_loop() -> None:
    assert sends(LONG, pp=2, virtual=2, schedule="interleaved") == [[GO, BACK, GO], [BACK, GO, BACK]]


def test_where_a_v_turns_nothing_is_sent() -> None:
    assert sends(LONG, pp=2, schedule="zbv") == [[GO, BACK], [BACK, GO]]


@pytest.mark.parametrize(
    ("layout", "share"), [({"cp": 2}, 2), ({"tp": 2, "sequence_parallel": True}, 2), ({"tp": 2}, 1)]
)
def test_a_rank_sends_what_it_holds(layout: dict[str, Any], share: int) -> None:
    assert sends(LONG, pp=2, **layout)[0] == [("send", "pp", "forward", 4, STREAM // share)]


def test_tp_ranks_may_send_a_share_that_is_put_together_again() -> None:
    """Megatron's scatter and gather: the next stage gathers the activation, this one the gradient that comes back."""
    first, last = sends(LONG, Recipe(system=TrainingSystem(whole_transfers=False)), pp=2, tp=2)
    assert first == [("send", "pp", "forward", 4, STREAM // 2), ("all_gather", "tp", "backward", 4, STREAM // 2)]
    assert last == [("send", "pp", "backward", 4, STREAM // 2), ("all_gather", "tp", "forward", 4, STREAM // 2)]


def test_what_lies_outside_the_blocks_communicates_on_the_stage_that_runs_it() -> None:
    """Block '' adds up tokens and positions on the first stage; its loss is on the last."""
    plan = plan_for(LONG, pp=2, tp=2, global_batch=4)
    local_block = make_local_blocks(LONG, plan)[""]
    counts = [
        sum(call.count for call in block_calls(local_block, plan, "forward", stage.numbers[""]))
        for stage in passes_by_stage(LONG, plan)
    ]
    assert counts == [0, 3]
