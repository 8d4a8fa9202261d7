"""Ops of a graph: where they run, what they read, which region they lie in, what they save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import graph_of, source_of
from torch import Tensor, nn

import meshwright
from meshwright.capturing.capture import capture_source
from meshwright.core.graph import Graph, Kind, Op
from meshwright.models.source import resolve

EAGER = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61,attention=eager,dropout=0.1"


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.mean()


def kind_of(graph: Graph, block: str) -> Kind:
    return graph.kind_by_block[block]


def forward_ops(kind: Kind) -> list[Op]:
    return [op for op in kind.ops if op.phase == "forward"]


# Edges.


def test_edges_of_a_block() -> None:
    """Names of parameters, numbers of ops, and the block's input; views are looked through."""
    norm, query, key, value, mixed, *_ = kind_of(graph_of("gpt"), "blocks.1").ops
    assert norm.inputs == ("@input", "attention_norm.weight", "attention_norm.bias")
    assert query.inputs == ("attention.query.bias", 0, "attention.query.weight")
    assert (query.module, key.module, value.module) == ("attention.query", "attention.key", "attention.value")
    assert mixed.name.startswith("_scaled_dot_product")
    assert mixed.inputs == (1, 2, 3)


def test_shapes_are_affine_in_the_samples() -> None:
    norm, query, *_ = kind_of(graph_of("gpt"), "blocks.1").ops
    assert [size.at(5) for size in norm.input_shapes[0]] == [5, 16, 32]
    assert [[size.at(5) for size in shape] for shape in query.input_shapes] == [[32], [5 * 16, 32], [32, 32]]
    assert [size.at(5) for size in query.result_shape] == [5 * 16, 32]


def test_every_edge_leads_somewhere() -> None:
    for model in ("gpt", "tied", "grouped", "resnet", "llama", "gpt2", "odd", "frozen"):
        graph = graph_of(model)
        names = {parameter.name for parameter in graph.parameters} | {
            name for name, _ in source_of(model).build().named_buffers()
        }
        kinds = graph.kind_by_block
        for block in graph.blocks:
            for number, op in enumerate(kinds[block.name].ops):
                assert len(op.inputs) == len(op.input_shapes)
                for source in op.inputs:
                    assert leads_somewhere(source, number, block.name, names, kinds), (model, block.name, source)


def leads_somewhere(source: int | str, number: int, block: str, names: set[str], kinds: dict[str, Kind]) -> bool:
    if isinstance(source, int):
        return source < number or source < len(kinds[block].ops)
    if source in ("@input", "@batch"):
        return True
    if source.startswith("@parameter:"):
        return source.removeprefix("@parameter:") in names
    if source.startswith("@"):
        home, _, other = source[1:].rpartition("#")
        return int(other) < len(kinds[home].ops)
    return (f"{block}.{source}" if block else source) in names


def test_edges_between_blocks_that_are_not_repeated() -> None:
    graph = graph_of("gpt")
    added = next(op for op in kind_of(graph, "").ops if op.name == "add")
    assert added.inputs == ("@token_embedding#0", "@position_embedding#0")
    assert kind_of(graph, "norm").ops[0].inputs[0] == "@input"
    assert kind_of(graph, "head").ops[0].inputs == ("@norm#0", "weight")
    assert "@batch" in kind_of(graph, "token_embedding").ops[0].inputs
    assert kind_of(graph, "position_embedding").ops[0].inputs[1] == "@#0"


def test_a_tied_parameter_is_read_by_the_name_it_has_in_the_block() -> None:
    head = kind_of(graph_of("tied"), "head")
    assert head.ops[0].inputs == ("@norm#0", "weight")


def test_a_parameter_outside_all_blocks() -> None:
    graph = graph_of("odd")
    assert any("scale" in op.inputs for op in kind_of(graph, "").ops)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.ones(1, 1).expand(len(x), 4)


def test_an_expanded_view_counts_what_is_stored() -> None:
    graph = meshwright.capture(Expanded(), torch.randn(2, 4), loss=mean)
    added = next(op for op in kind_of(graph, "").ops if op.name == "add")
    assert added.read_bytes.at(10) == 10 * 4 * 4 + 4


# Modules and regions.


def test_backward_ops_run_where_their_forward_ran() -> None:
    for block in ("blocks.0", "blocks.1"):
        ops = kind_of(graph_of("gpt"), block).ops
        modules = {op.module for op in ops if op.phase == "forward"}
        assert {op.module for op in ops if op.phase == "backward"} == modules - {""}, "a sum needs no op in backward"
        products = [op for op in ops if op.phase == "backward" and op.kind == "matmul"]
        assert [op.module for op in products][:4] == ["mlp.contract"] * 2 + ["mlp.expand"] * 2


@pytest.mark.parametrize("model", ["gpt", "grouped", "llama", "gpt2", EAGER])
def test_the_attention_core(model: str) -> None:
    """No op that reads a parameter, none outside the attention module, and every one that mixes positions."""
    graph = graph_of(model)
    kind = kind_of(graph, graph.repeated_blocks[1])
    inside = [op for op in kind.ops if op.region == "attention"]
    assert {op.module for op in inside} <= {"attention", "self_attn", "attn"}
    assert not any(isinstance(source, str) and not source.startswith("@") for op in inside for source in op.inputs)
    mixing = [op for op in kind.ops if op.kind == "attention" or op.name in ("bmm", "_softmax", "bernoulli_")]
    assert {op.phase for op in mixing} == {"forward", "backward"}
    for op in mixing:
        assert op.region == "attention" or op.module not in ("attention", "self_attn", "attn")


def test_the_eager_core_holds_scores_mask_softmax_and_dropout() -> None:
    kind = kind_of(graph_of(EAGER), "blocks.1")
    names = [op.name for op in forward_ops(kind) if op.region == "attention"]
    assert names.count("bmm") == 2
    assert {"mul", "masked_fill", "_softmax", "bernoulli_"} <= set(names)
    assert sum(op.name == "bmm" and op.region == "attention" for op in kind.ops) == 6


class OneModule(nn.Module):
    """All of a block in one forward: the core ends where parameters are read."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out, self.up = (nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.randn(8, 8)),
                                       nn.Parameter(torch.randn(8, 8)))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x @ self.mix).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0] @ self.out
        return x + torch.tanh(x @ self.up)


def test_the_core_ends_at_parameters() -> None:
    graph = meshwright.capture(OneModule(), torch.randn(2, 6, 8), loss=mean)
    inside = {op.name for op in graph.kinds[0].ops if op.region == "attention" and op.phase == "forward"}
    assert "tanh" not in inside
    assert "add" not in inside
    assert any(name.startswith("_scaled_dot_product") for name in inside)


# What is saved.


@pytest.mark.parametrize("model", ["gpt", "grouped", "resnet", "llama", "odd", EAGER])
def test_saved_bytes_are_what_is_alive_at_the_end_of_forward(model: str) -> None:
    """All that is kept, less the model's output, which is given back before backward begins."""
    graph = graph_of(model)
    passes = [graph.kind_by_block[segment.block].passes[segment.number] for segment in graph.timeline]
    kept = sum(step.kept_at(3) for step in passes if step.phase == "forward")
    saved = sum(op.saved_bytes.at(3) for kind in graph.kind_by_block.values() for op in kind.ops)
    output = kind_of(graph, {"odd": "leave"}.get(model) or graph.blocks[-1].name).passes[0].output_bytes.at(3)
    assert kept - saved == output
    assert not any(op.saved_bytes.at(3) for kind in graph.kinds for op in kind.ops if op.phase == "backward")


def test_saved_bytes_of_a_block_by_hand() -> None:
    """A GPT block saves ten times its input, the hidden layer of the MLP four times over, and small statistics."""
    ops = {op.module: op for op in forward_ops(kind_of(graph_of("gpt"), "blocks.1"))}
    stream = 16 * 32 * 4
    assert ops["attention.query"].saved_bytes.at(1) == stream
    assert ops["mlp.expand"].saved_bytes.at(1) == ops["mlp"].saved_bytes.at(1) == 4 * stream
    assert ops["mlp.contract"].saved_bytes.at(1) == 0
    assert ops["attention_norm"].saved_bytes.at(1) == stream + 2 * 16 * 4


# Passes and the timeline.


def test_passes_of_blocks() -> None:
    graph = graph_of("gpt")
    for block in graph.blocks[1:]:
        first, second = kind_of(graph, block.name).passes
        assert (first.phase, second.phase) == ("forward", "backward")
        assert second.first_op == first.num_ops
        assert first.num_ops + second.num_ops == len(kind_of(graph, block.name).ops)
    order = [segment.block for segment in graph.timeline if segment.block]
    forward, backward = order[: len(order) // 2], order[len(order) // 2 :]
    names = ["blocks.0", "blocks.1", "norm", "head"]
    assert forward[2:] == names
    assert backward[:4] == names[::-1]


def test_what_a_block_hands_on() -> None:
    graph = graph_of("gpt")
    forward, backward = kind_of(graph, "blocks.0").passes
    assert forward.output_bytes.at(3) == 3 * 16 * 32 * 4
    assert backward.output_bytes.at(3) == 0


class Twice(nn.Module):
    """Calls the same stack of blocks two times."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize("depth", [2, 6])
def test_a_block_called_twice_has_four_passes(depth: int) -> None:
    graph = meshwright.capture(Twice(depth), torch.randn(2, 5, 8), loss=mean)
    kind = kind_of(graph, "layers.1")
    assert [step.phase for step in kind.passes] == ["forward", "forward", "backward", "backward"]
    assert sum(step.num_ops for step in kind.passes) == len(kind.ops)
    once = meshwright.capture(nn.Sequential(*Twice(depth).layers), torch.randn(2, 5, 8), loss=mean)
    assert len(graph.timeline) > len(once.timeline)


def test_a_module_without_blocks() -> None:
    graph = meshwright.capture(nn.Linear(5, 7), torch.randn(2, 5), loss=mean)
    assert [block.name for block in graph.blocks] == [""]
    assert {segment.block for segment in graph.timeline} == {""}
    assert graph.kinds[0].ops[0].inputs == ("bias", "@batch", "weight")


def test_frozen_parts_do_less() -> None:
    """A frozen layer has no gradients of weights; what lies below the first trained parameter has no backward at all."""
    graph = graph_of("frozen")
    assert [step.phase for step in kind_of(graph, "enter").passes] == ["forward"]
    products = {
        block: sum(op.kind == "matmul" and op.phase == "backward" for op in kind_of(graph, block).ops)
        for block in ("layers.0", "layers.1")
    }
    assert products == {"layers.0": 4, "layers.1": 2}
    trained = {parameter.name for parameter in graph.parameters if parameter.trainable}
    assert set(graph.gradient_order) == trained


def test_a_graph_survives_its_file(tmp_path: Any) -> None:
    graph = capture_source(resolve("gpt:layers=1,hidden=8,heads=2,seq=4,vocab=11"))
    assert Graph.load(graph.save(tmp_path / "graph.json")) == graph
    assert Graph.load(graph.save(tmp_path / "graph.toml")) == graph
