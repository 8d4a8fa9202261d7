"""Local blocks: the shares that ranks compute and hold under tp, sequence parallel and cp add up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import plan_for
from msgspec.structs import replace
from strategies import quick
from transformer import Sizes, transformer_graph

from meshwright.core.errors import PlanError
from meshwright.core.flow import Affine
from meshwright.core.graph import Graph, Op
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.block_calls import block_calls
from meshwright.cost.compute.kernel_costs import matmul_size
from meshwright.cost.local_block import LocalBlock, make_local_blocks
from meshwright.cost.memory.footprint import Footprints
from meshwright.rules.sharding import plain_sharding

sizes_of = st.builds(
    Sizes,
    layers=st.integers(1, 2),
    hidden=st.sampled_from([32, 64]),
    heads=st.sampled_from([4, 8]),
    seq=st.sampled_from([16, 32]),
    attention=st.sampled_from(["fused", "eager"]),
    dropout=st.booleans(),
    outputs_first=st.booleans(),
)
layouts = st.sampled_from([{}, {"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"cp": 2}, {"cp": 2, "tp": 2}])


def block_of(graph: Graph, **request: object) -> LocalBlock:
    return make_local_blocks(graph, plan_for(graph, **request))["blocks.0"]


def has_weight_result(op: Op) -> bool:
    return op.written_bytes.per_sample == 0


def test_one_rank_alone_does_everything() -> None:
    local_block = block_of(transformer_graph())
    for number in range(len(local_block.kind.ops)):
        assert local_block.work_share(number) == local_block.result_share(number) == 1
    assert local_block.result_share("@input") == 1


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_divides_split_work_only(tp: int) -> None:
    local_block = block_of(transformer_graph(), tp=tp)
    for number, op in enumerate(local_block.kind.ops):
        share = 1 / tp if local_block.labels.work_split[number] else 1
        assert local_block.work_share(number) == share, op.name
    assert local_block.result_share("@input") == 1, "blocks hand on whole tensors"


def test_sequence_parallel_divides_the_rest_too() -> None:
    local_block = block_of(transformer_graph(attention="eager", dropout=True), tp=4, sequence_parallel=True)
    for number, op in enumerate(local_block.kind.ops):
        if op.written_bytes.per_sample:
            assert local_block.work_share(number) == local_block.result_share(number) == 1 / 4, op.name
    assert local_block.result_share("@input") == 1 / 4


def test_cp_divides_all_that_has_tokens_and_no_weight() -> None:
    local_block = block_of(transformer_graph(), cp=2)
    for number, op in enumerate(local_block.kind.ops):
        assert local_block.work_share(number) == 1 / 2, "also of a weight's gradient: a sum over tokens"
        assert local_block.result_share(number) == (1 if has_weight_result(op) else 1 / 2)


def test_blocks_of_one_kind_share_a_division() -> None:
    graph = transformer_graph(layers=2)
    found = make_local_blocks(graph, plan_for(graph, tp=2))
    assert found["blocks.0"] is found["blocks.1"]
    assert set(found) == {block.name for block in graph.blocks}


@pytest.mark.parametrize("tp", [2, 4])
def test_the_vocabulary_lies_over_tp_up_to_the_loss(tp: int) -> None:
    """The head's logits stay split, and what block '' makes of them too; the stream before and after is whole."""
    graph = transformer_graph()
    found = make_local_blocks(graph, plan_for(graph, tp=tp))
    assert found["head"].result_share(0) == 1 / tp
    assert [found[""].result_share(number) for number in (1, 3, 4)] == [1 / tp] * 3
    assert found[""].result_share(0) == found["norm"].result_share(0) == found["token_embedding"].result_share(0) == 1
    assert found["head"].result_share("@#4") == found[""].result_share("@head#0") == 1 / tp
    assert found["head"].labels.reduced_backward == (0,)
    assert found["token_embedding"].labels.reduced_forward == (0,)
    assert found["position_embedding"].labels.reduced_forward == ()


@quick
@given(sizes_of, layouts, st.sampled_from([None, "full", "selective"]), st.booleans())
def test_what_is_taken_is_given_back(
    sizes: Sizes, layout: dict[str, object], recompute: str | None, compiled: bool
) -> None:
    """Over a whole step every layout gives back what it took.

    Positions, which do not grow with the samples, are known to be whole where they are made, but not to who reads them:
    under cp they are given back in part.
    """
    graph = transformer_graph(sizes)
    plan = plan_for(graph, **layout, recompute=recompute, compile=compiled)
    local_blocks, footprints = make_local_blocks(graph, plan), Footprints(plan, Recipe())
    live = most = 0.0
    for segment in graph.timeline:
        footprint = footprints.of(local_blocks[segment.block], segment.block, segment.number)
        live += footprint.kept
        most = max(most, live + footprint.peak)
        assert footprint.peak >= footprint.rebuilt >= 0
        assert live >= -1e-6
    positions = 2 * sizes.stream_bytes if "cp" in layout else 0
    assert live == pytest.approx(0, abs=1e-6 * most + positions)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_split_table_has_a_split_gradient(tp: int) -> None:
    """A rank adds up the rows it has; the table of positions, which is whole, is added up whole."""
    graph = transformer_graph()
    found = make_local_blocks(graph, plan_for(graph, tp=tp))
    assert found["token_embedding"].kind.ops[1].name == "embedding_dense_backward"
    assert found["token_embedding"].work_share(1) == found["token_embedding"].result_share(1) == 1 / tp
    assert found["position_embedding"].work_share(1) == found["position_embedding"].result_share(1) == 1


def by_hand(plan: Plan, graph: Graph) -> Plan:
    """With attention split, whatever its heads."""
    return replace(plan, sharding=plain_sharding(graph))


@pytest.mark.parametrize("attention", ["fused", "eager"])
def test_heads_must_divide_over_tp(attention: str) -> None:
    graph = transformer_graph(heads=4, hidden=96, attention=attention)
    said = "4 attention heads in blocks of kind 'Block' do not divide over tp=3: use a divisor of 4"
    with pytest.raises(PlanError, match=said):
        make_local_blocks(graph, by_hand(plan_for(graph, tp=3), graph))
    assert make_local_blocks(graph, plan_for(graph, tp=4))


def test_explicit_attention_runs_under_cp() -> None:
    """Tokens are exchanged for heads: a rank multiplies all tokens of its share of the heads."""
    local_block = block_of(transformer_graph(attention="eager"), cp=2)
    scores = [
        number for number, op in enumerate(local_block.kind.ops) if op.kind == "matmul" and op.region == "attention"
    ]
    assert scores
    assert {local_block.work_share(number) for number in scores} == {1 / 2}


@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 8), (2, 4)])
def test_heads_must_divide_over_tp_and_cp_together(attention: str, tp: int, cp: int) -> None:
    graph = transformer_graph(heads=4, hidden=64, seq=32, attention=attention)
    said = r"4 attention heads in blocks of kind 'Block' do not divide over tp · cp = 8, as the exchange of tokens for heads"
    with pytest.raises(PlanError, match=said):
        make_local_blocks(graph, plan_for(graph, tp=tp, cp=cp, context="heads"))
    assert make_local_blocks(graph, plan_for(graph, tp=tp, cp=4 // tp))
    assert plan_for(graph, tp=tp, cp=4 // tp).context == "heads"
    assert plan_for(graph, tp=tp, cp=cp).context == "ring"
    assert make_local_blocks(graph, plan_for(graph, tp=tp, cp=cp))


def grouped_graph(key_heads: int) -> Graph:
    """8 heads of queries, fewer of keys and values."""
    graph = transformer_graph(heads=8, hidden=64, seq=32)
    kinds = tuple(replace(kind, ops=tuple(_with_key_heads(op, key_heads) for op in kind.ops)) for kind in graph.kinds)
    return replace(graph, kinds=kinds)


def _with_key_heads(op: Op, count: int) -> Op:
    if op.kind != "attention" or op.phase != "forward":
        return op
    queries, *others = op.input_shapes
    fewer = tuple((shape[0], Affine(float(count), 0.0), *shape[2:]) for shape in others[:2])
    return replace(op, input_shapes=(queries, *fewer, *others[2:]))


@pytest.mark.parametrize(
    ("key_heads", "tp", "cp", "times"),
    [(8, 1, 4, 1), (4, 1, 4, 1), (2, 1, 4, 2), (2, 2, 2, 2), (1, 1, 8, 8), (4, 2, 4, 2)],
)
def test_key_heads_go_to_every_rank_whose_queries_read_them(key_heads: int, tp: int, cp: int, times: int) -> None:
    """A rank has heads of queries / (tp · cp), and as many heads of keys as those read, of all tokens."""
    graph = grouped_graph(key_heads)
    local_block = block_of(graph, tp=tp, cp=cp)
    (op,) = [op for op in local_block.kind.ops if op.kind == "attention" and op.phase == "forward"]
    assert [local_block.repeats[source] for source in op.inputs[1:3]] == [times, times]
    assert key_heads * times % (tp * cp) == 0
    assert local_block.result_share(op.inputs[1]) == times / (tp * cp)
    calls = [call for call in block_calls(local_block, plan_for(graph, tp=tp, cp=cp), "forward") if call.axis == "cp"]
    query, key, value, made = [call.num_bytes for call in calls]
    assert query == made
    assert key == value
    assert key * 8 == query * key_heads * times


def test_key_heads_must_divide_over_tp() -> None:
    said = "8 attention heads and 2 of keys and values in blocks of kind 'Block' do not divide over tp=4: use a divisor of 2"
    with pytest.raises(PlanError, match=said):
        make_local_blocks(grouped_graph(2), by_hand(plan_for(grouped_graph(2), tp=4), grouped_graph(2)))


# The sizes of a matmul on one rank


def matmuls(**request: object) -> dict[str, tuple[float, ...]]:
    """Weight → batch, rows, columns, depth of the matmul that applies it, one sample."""
    graph = transformer_graph(hidden=64, seq=32)
    local_block = block_of(graph, **request)
    found = {}
    for number, op in enumerate(local_block.kind.ops):
        if op.phase == "forward" and op.kind == "matmul":
            size = matmul_size(local_block, number, 1)
            found[str(op.inputs[-1])] = (size.batch, size.rows, size.columns, size.depth)
    return found


def test_a_column_has_fewer_columns_and_a_row_less_depth() -> None:
    assert matmuls()["mlp.expand.weight"] == (1, 32, 256, 64)
    assert matmuls(tp=2)["mlp.expand.weight"] == (1, 32, 128, 64)
    assert matmuls(tp=2)["mlp.contract.weight"] == (1, 32, 64, 128)
    assert matmuls(tp=2, sequence_parallel=True) == matmuls(tp=2), "the split part sees all tokens"
    assert matmuls(cp=2)["mlp.expand.weight"] == (1, 16, 256, 64)


@quick
@given(sizes_of, layouts)
def test_a_rank_multiplies_its_share_of_the_flops(sizes: Sizes, layout: dict[str, object]) -> None:
    graph = transformer_graph(sizes)
    for name, local_block in make_local_blocks(graph, plan_for(graph, **layout)).items():
        for number, op in enumerate(local_block.kind.ops):
            if op.kind == "matmul":
                size = matmul_size(local_block, number, 3)
                flops = 2 * size.batch * size.rows * size.columns * size.depth
                assert flops == pytest.approx(local_block.work_share(number) * op.flops.at(3)), (name, op.inputs)


def test_a_ring_needs_two_pieces_a_rank() -> None:
    graph = transformer_graph(heads=4, hidden=64, seq=12)
    assert make_local_blocks(graph, plan_for(graph, cp=4))
    with pytest.raises(PlanError, match="12 tokens a sample do not divide over cp=4, two pieces each, as a ring needs"):
        make_local_blocks(graph, plan_for(graph, cp=4, context="ring"))


def test_what_goes_round_lies_beside_an_attention() -> None:
    graph = transformer_graph(heads=4, hidden=64, seq=32)
    ring, heads = block_of(graph, cp=2, context="ring"), block_of(graph, cp=2)
    numbers = {op.phase: number for number, op in enumerate(ring.kind.ops) if op.kind == "attention"}
    keys = 32 * 64 // 2
    assert ring.ring_message_bytes(numbers["forward"], 3) == 3 * 2 * keys * (2 * 2)
    assert ring.ring_message_bytes(numbers["backward"], 3) == 3 * 2 * keys * (2 * 2 + 3 * 4)
    assert {heads.ring_message_bytes(number, 3) for number in numbers.values()} == {0.0}


def test_in_a_ring_every_piece_has_its_kernels() -> None:
    graph = transformer_graph(heads=4, hidden=64, seq=32)
    ring, heads = block_of(graph, cp=4, context="ring"), block_of(graph, cp=4)
    for number, op in enumerate(ring.kind.ops):
        assert ring.launches_by_op[number] == (36 * op.count if op.kind == "attention" else op.count)
        assert heads.launches_by_op[number] == op.count
