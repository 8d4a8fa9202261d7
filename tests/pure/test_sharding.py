"""Which weights tp splits, how labels run along the ops, and which shardings are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machines import chain_graph, named_machine, plan_for
from transformer import Sizes, transformer_graph
from writer import Writer, shape_of

from meshwright.core.errors import PlanError
from meshwright.core.graph import Graph, Kind, Op
from meshwright.core.names import expand_names
from meshwright.core.plan import BlockSharding, Plan, TensorSharding
from meshwright.cost.estimate import estimate
from meshwright.rules.labels import labels_of
from meshwright.rules.sharding import plain_sharding, plain_ways, ways_by_block

COLUMNS = [f"attention.{name}" for name in ("query", "key", "value")] + ["mlp.expand"]
ROWS = ["attention.output", "mlp.contract"]


def chosen(graph: Graph) -> dict[str, dict[str, tuple[str, ...]]]:
    """Kind → tensor → dims."""
    kinds = {block.name: block.kind for block in graph.blocks}
    return {
        kinds[expand_names(sharding.for_blocks)[0]]: {tensor.tensor: tensor.dims for tensor in sharding.tensors}
        for sharding in plain_sharding(graph)
    }


# The plain choice


@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("outputs_first", [True, False])
def test_the_plain_choice_is_megatrons(attention: str, outputs_first: bool) -> None:
    """Linear keeps [outputs, inputs], Conv1D [inputs, outputs]: the dim changes, the choice does not."""
    found = chosen(transformer_graph(attention=attention, outputs_first=outputs_first))
    by_outputs, by_inputs = (("tp", ""), ("", "tp")) if outputs_first else (("", "tp"), ("tp", ""))
    assert found["Block"] == {
        **{f"{name}.weight": by_outputs for name in COLUMNS},
        **{f"{name}.bias": ("tp",) for name in COLUMNS},
        **{f"{name}.weight": by_inputs for name in ROWS},
    }
    assert found["Embedding"] == {"weight": ("tp", "")}
    assert found["Linear"] == {"weight": ("tp", "")}
    assert set(found) == {"Block", "Embedding", "Linear"}, "positions and norms are whole"


@pytest.mark.parametrize("attention", ["fused", "eager"])
def test_attention_whose_heads_do_not_divide_stays_whole(attention: str) -> None:
    """Four heads over eight ranks: the MLP and the vocabulary are split alone, and so is their work."""
    graph = transformer_graph(attention=attention)
    plan = plan_for(graph, tp=8)
    block = next(rule for rule in plan.sharding if rule.for_blocks[0].startswith("blocks"))
    assert {tensor.tensor.partition(".")[0] for tensor in block.tensors} == {"mlp"}
    assert estimate(graph, plan, named_machine()).step_seconds > 0
    by_hand = msgspec.structs.replace(plan, sharding=plain_sharding(graph))
    with pytest.raises(PlanError, match=r"4 attention heads .* do not divide over tp=8: use a divisor of 4"):
        estimate(graph, by_hand, named_machine())


def test_a_small_vocabulary_is_not_split() -> None:
    assert set(chosen(transformer_graph(vocab=512))) == {"Block"}


def test_weights_without_a_partner_are_whole() -> None:
    """One matrix a block: nothing reads its split result, so nothing is gained by splitting."""
    assert plain_sharding(chain_graph()) == ()


def gated() -> Kind:
    """silu(x A) · (x B), times C: the MLP of LLaMA."""
    writer = Writer("Gated", "bf16")
    x = writer.outside("@input", shape_of("n", 8, 64), freed=False)
    tokens = ("n", 8)

    def linear(name: str, source: Any, inputs: int, outputs: int) -> Any:
        reads = [source, (name, shape_of(inputs, outputs))]
        shapes = [shape_of(tokens, inputs), shape_of(inputs, outputs)]
        return writer.op("forward", "mm", "matmul", reads, shape_of(tokens, outputs), input_shapes=shapes)

    gate, up = linear("gate", x, 64, 192), linear("up", x, 64, 192)
    bent = writer.op("forward", "silu", "transcendental", [gate], gate.shape)
    both = writer.op("forward", "mul", "elementwise", [bent, up], gate.shape)
    linear("down", both, 192, 64)
    return writer.kind(("forward", 5))


def test_a_gated_mlp_splits_both_of_its_first_weights() -> None:
    graph = transformer_graph()
    shape = next(parameter for parameter in graph.parameters if len(parameter.shape) == 2)
    parameters = {
        name: msgspec.structs.replace(shape, name=name, shape=size, block="")
        for name, size in {"gate": (192, 64), "up": (192, 64), "down": (64, 192)}.items()
    }
    ways = plain_ways(gated(), parameters)
    assert ways == {"gate": "column", "up": "column", "down": "row"}
    labels = labels_of(gated(), ways)
    assert labels.results == ("split", "split", "split", "split", "whole")
    assert (labels.reduced_forward, len(labels.reduced_backward)) == ((4,), 1)


def test_a_copied_weight_is_followed_to_its_parameter() -> None:
    """Under mixed precision an op reads a 16-bit copy of the weight, and a copy of the activation of its own."""
    plain = transformer_graph()
    cast = msgspec.structs.replace(plain, kinds=tuple(_with_casts(kind) for kind in plain.kinds))
    assert chosen(cast) == chosen(plain)
    ways = ways_by_block(plan_for(cast, tp=2), cast)["blocks.0"]
    labels = labels_of(cast.kind_by_block["blocks.0"], ways)
    assert (len(labels.reduced_forward), len(labels.reduced_backward)) == (2, 2)


def _with_casts(kind: Kind) -> Kind:
    """Every forward matmul reads copies of what it read."""
    if kind.name != "Block":
        return kind
    ops: list[Op] = []
    moved: dict[int, int] = {}
    for number, op in enumerate(kind.ops):
        inputs = [moved[source] if isinstance(source, int) else source for source in op.inputs]
        if op.phase == "forward" and op.kind == "matmul":
            for place, (source, shape) in enumerate(zip(inputs, op.input_shapes, strict=True)):
                fields = {"inputs": (source,), "input_shapes": (shape,), "result_shape": shape}
                ops.append(Op(name="_to_copy", kind="copy", phase="forward", **fields))
                inputs[place] = len(ops) - 1
        moved[number] = len(ops)
        ops.append(msgspec.structs.replace(op, inputs=tuple(inputs)))
    return msgspec.structs.replace(kind, ops=tuple(ops), passes=())


# Labels


@pytest.mark.parametrize("attention", ["fused", "eager"])
def test_attention_and_mlp_add_up_once_each_way(attention: str) -> None:
    graph = transformer_graph(attention=attention, dropout=True)
    kind = graph.kind_by_block["blocks.0"]
    labels = labels_of(kind, ways_by_block(plan_for(graph, tp=2), graph)["blocks.0"])
    assert [_weight(kind, number) for number in labels.reduced_forward] == [f"{name}.weight" for name in ROWS]
    first = [_weight(kind, number) for number in labels.reduced_backward]
    assert first == ["attention.query.weight", "mlp.expand.weight"], "one sum for all that read the same tensor"


def _weight(kind: Kind, number: int) -> str:
    (name,) = [source for source in kind.ops[number].inputs if str(source).endswith("weight")]
    return str(name)


def test_labels_of_every_op_of_a_block() -> None:
    graph = transformer_graph(attention="eager", dropout=True)
    kind = graph.kind_by_block["blocks.0"]
    labels = labels_of(kind, ways_by_block(plan_for(graph, tp=2), graph)["blocks.0"])
    wide = {"_softmax", "bmm", "gelu", "gelu_backward", "_softmax_backward_data"}
    whole = {"native_layer_norm", "native_layer_norm_backward", "add"}
    for op, label, work in zip(kind.ops, labels.results, labels.work_split, strict=True):
        if op.name in wide:
            assert (label, work) == ("split", True), op.name
        elif op.name in whole:
            assert (label, work) == ("whole", False), op.name
        elif op.kind == "matmul":
            assert work, "every product with a weight is shared"
    gradients = [
        label
        for op, label in zip(kind.ops, labels.results, strict=True)
        if op.phase == "backward" and op.kind == "matmul" and not any(dim.per_sample for dim in op.result_shape)
    ]
    assert gradients == ["split"] * 6, "the gradient of a split weight is split"


def test_without_ways_everything_is_whole() -> None:
    kind = transformer_graph().kind_by_block["blocks.0"]
    labels = labels_of(kind, {})
    assert set(labels.results) == {"whole"}
    assert not any(labels.work_split)
    assert labels.reduced_forward == labels.reduced_backward == ()


def test_one_block_can_differ_from_its_kind() -> None:
    graph = transformer_graph()
    plan = plan_for(graph, tp=2)
    other = BlockSharding(
        for_blocks=("blocks.1",), tensors=(TensorSharding(tensor="mlp.expand.weight", dims=("", "")),)
    )
    ways = ways_by_block(msgspec.structs.replace(plan, sharding=(*plan.sharding, other)), graph)
    assert len(ways["blocks.0"]) == 6
    assert ways["blocks.1"] == {}


# What is refused


def replaced(plan: Plan, tensor: str, dims: tuple[str, ...]) -> Plan:
    rule = BlockSharding(for_kind="Block", tensors=(TensorSharding(tensor=tensor, dims=dims),))
    return msgspec.structs.replace(plan, sharding=(rule,))


@pytest.mark.parametrize(
    ("tensor", "dims", "said"),
    [
        (
            "mlp.expnd.weight",
            ("tp", ""),
            "sharding for kind 'Block' names tensor 'mlp.expnd.weight', which its blocks do not have: "
            "did you mean 'mlp.expand.weight'?",
        ),
        (
            "mlp.expand.weight",
            ("tp",),
            r"sharding of 'mlp.expand.weight' has 1 dims, but its shape is \[256, 64\]: give one entry a dim",
        ),
        ("mlp.expand.bias", ("tp", ""), r"has 2 dims, but its shape is \[256\]: give one entry a dim"),
    ],
)
def test_a_sharding_that_does_not_fit_the_model_is_refused(tensor: str, dims: tuple[str, ...], said: str) -> None:
    graph = transformer_graph()
    with pytest.raises(PlanError, match=said.replace("?", r"\?")):
        estimate(graph, replaced(plan_for(graph, tp=2), tensor, dims), named_machine())


def test_a_sharding_for_a_kind_the_model_does_not_have_is_refused() -> None:
    graph = transformer_graph()
    rule = BlockSharding(for_kind="Blok", tensors=())
    plan = msgspec.structs.replace(plan_for(graph, tp=2), sharding=(rule,))
    with pytest.raises(PlanError, match=r"sharding is for kind 'Blok', which the model does not have: did you mean"):
        estimate(graph, plan, named_machine())


@pytest.mark.parametrize(
    ("sizes", "request_fields", "changes", "said"),
    [
        (
            {},
            {"tp": 2},
            {"sharding": ()},
            "the plan has tp=2 but splits no tensor of",
        ),
        ({}, {}, {"sequence_parallel": True}, "sequence parallel shards tokens over tp, but tp=1: leave it out"),
        ({}, {"tp": 3}, {}, "4 attention heads in blocks of kind 'Block' do not divide over tp=3: use a divisor of 4"),
        ({}, {"tp": 5}, {}, "4 attention heads .* do not divide over tp=5: use a divisor of 4"),
        (
            {"seq": 36},
            {"cp": 8},
            {},
            r"36 tokens a sample do not divide over cp=8, two pieces each, as a ring needs: change",
        ),
        ({"seq": 3}, {"cp": 4, "context": "heads"}, {}, r"3 tokens a sample are too few for cp=4"),
        ({"seq": 40}, {"cp": 8}, {}, r"40 tokens a sample do not divide over cp=8, two pieces each"),
        (
            {"seq": 40},
            {"cp": 8, "context": "heads"},
            {},
            r"4 attention heads .* do not divide over tp · cp = 8, as the exchange of tokens",
        ),
        (
            {"seq": 34},
            {"tp": 2, "cp": 2, "sequence_parallel": True},
            {},
            r"34 tokens a sample do not divide over tp · cp = 4, as sequence parallel needs",
        ),
    ],
)
def test_degrees_the_model_does_not_divide_over_are_refused(
    sizes: dict[str, Any], request_fields: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    graph = transformer_graph(Sizes(**sizes))
    plan = msgspec.structs.replace(plan_for(graph, **request_fields), **changes)
    with pytest.raises(PlanError, match=said):
        estimate(graph, plan, named_machine())
