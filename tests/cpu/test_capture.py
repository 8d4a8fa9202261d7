"""Capture: flops against hand formulas, blocks and ties of every model, quantities at other batch sizes, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from cases import ASSETS, MODELS, graph_of, source_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import meshwright
from meshwright.capturing.blocks import find_blocks
from meshwright.capturing.capture import capture, capture_source
from meshwright.capturing.recording import Recording
from meshwright.capturing.stand_ins import Arithmetic
from meshwright.capturing.stretches import find_stretches
from meshwright.capturing.trace import trace
from meshwright.core.errors import CaptureError, InputError, ModelError
from meshwright.core.graph import Graph, Pass, Precision, Segment, identity
from meshwright.models.faked.build import build_on_meta
from meshwright.models.objective import Objective, call, objective_of
from meshwright.models.parameters import list_parameters
from meshwright.models.source import resolve


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.mean()


def linear(inputs: int, outputs: int, samples: int = 2) -> Graph:
    return meshwright.capture(nn.Linear(inputs, outputs, bias=False), torch.randn(samples, inputs), loss=mean)


# Flops.


@pytest.mark.parametrize("samples", [1, 2, 17])
def test_flops_of_a_linear(samples: int) -> None:
    """Forward 2BKN and 2BKN for the weight's gradient; nobody asks for the input's."""
    assert linear(5, 7).flops(samples) == 4 * samples * 5 * 7


def test_flops_of_two_linears() -> None:
    """The second one's input does need its gradient: 6BKN."""
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    graph = meshwright.capture(module, torch.randn(2, 5), loss=mean)
    assert graph.flops(10) == 10 * (4 * 5 * 7 + 6 * 7 * 3)


@pytest.mark.parametrize(
    ("layers", "hidden", "seq", "vocab"), [(1, 16, 8, 32), (3, 64, 32, 100), (2, 768, 1024, 50304)]
)
def test_flops_of_gpt_by_hand(layers: int, hidden: int, seq: int, vocab: int) -> None:
    """Six for every weight of a matmul and token; attention is 2 products forward and 5 backward of 2·seq²·hidden."""
    graph = capture_source(resolve(f"gpt:layers={layers},hidden={hidden},heads=4,seq={seq},vocab={vocab}"))
    matmul_weights = layers * 12 * hidden**2 + vocab * hidden
    attention = layers * 7 * 2 * seq**2 * hidden
    for samples in (1, 3, 8):
        assert graph.flops(samples) == samples * (6 * matmul_weights * seq + attention)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flops_of_eager_attention_are_two_products_forward_and_four_backward(dropout: float) -> None:
    graph = capture_source(resolve(f"gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61,attention=eager,dropout={dropout}"))
    assert graph.flops(1) == 6 * (2 * 12 * 32**2 + 61 * 32) * 16 + 2 * 6 * 2 * 16**2 * 32


def test_flops_of_llama_by_hand() -> None:
    """Keys and values are narrower than queries; the gated MLP has three matrices."""
    graph = graph_of("grouped")
    weights = 2 * (2 * 32**2 + 2 * 32 * 16 + 3 * 32 * 48) + 61 * 32
    assert graph.flops(3) == 3 * (6 * weights * 16 + 2 * 7 * 2 * 16**2 * 32)


def test_flops_follow_the_rule_of_six() -> None:
    graph = capture_source(resolve("gpt:layers=4,hidden=512,heads=8,seq=64,vocab=1024,tied=true"))
    assert graph.flops(3) == pytest.approx(6 * graph.num_parameters * 3 * 64, rel=0.03)


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_flops_of_grouped_convolutions_by_hand(groups: int) -> None:
    """Each output channel sees the inputs of its group; backward is two such products, the first layer's only one."""
    first, second = (nn.Conv2d(8, 8, 3, padding=1, groups=count, bias=False) for count in (1, groups))
    graph = capture(nn.Sequential(first, second), torch.randn(2, 8, 6, 6), objective_of(mean, None))
    products = [2 * 36 * 8 * 8 * 9, 2 * 36 * 8 * (8 // groups) * 9]
    assert graph.flops(3) == 3 * (2 * products[0] + 3 * products[1])


def test_flops_of_resnet_are_those_torch_counts() -> None:
    module = source_of("resnet").build()
    batch = source_of("resnet").example(5)  # type: ignore[misc]
    with FlopCounterMode(display=False) as counter:
        source_of("resnet").objective.loss(call(module, batch), batch).backward()
    assert graph_of("resnet").flops(5) == counter.get_total_flops()


# Blocks and parameters.


BLOCKS = {
    "gpt": (["token_embedding", "position_embedding"], "blocks", 2, ["norm", "head"]),
    "grouped": (["token_embedding"], "blocks", 2, ["norm", "head"]),
    "llama": (["model.embed_tokens"], "model.layers", 2, ["model.norm", "lm_head"]),
    "gpt2": (["transformer.wte", "transformer.wpe"], "transformer.h", 2, ["transformer.ln_f", "lm_head"]),
    "odd": (["enter"], "layers", 3, ["leave"]),
}


@pytest.mark.parametrize("model", BLOCKS)
def test_blocks(model: str) -> None:
    before, stem, count, after = BLOCKS[model]
    repeated = [f"{stem}.{index}" for index in range(count)]
    graph = graph_of(model)
    assert [block.name for block in graph.blocks] == ["", *before, *repeated, *after]
    assert list(graph.repeated_blocks) == repeated


def test_blocks_of_resnet_are_its_bottlenecks() -> None:
    graph = graph_of("resnet")
    assert list(graph.repeated_blocks) == [f"stages.{stage}.{index}" for stage in range(4) for index in range(2)]
    assert [block.name for block in graph.blocks if not block.repeated] == ["", "stem", "head"]


def test_the_innermost_list_inside_a_block_is_not_opened() -> None:
    inner = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]
    block = type("Block", (nn.Module,), {})
    first, second = block(), block()
    first.parts, second.parts = nn.ModuleList(inner[:1]), nn.ModuleList(inner[1:])
    assert find_blocks(nn.ModuleList([first, second])) == {"0": True, "1": True}


@pytest.mark.parametrize("model", BLOCKS)
def test_blocks_that_do_the_same_share_a_kind(model: str) -> None:
    graph = graph_of(model)
    assert len({block.kind for block in graph.blocks if block.repeated}) == 1
    assert {block.kind for block in graph.blocks} == {kind.name for kind in graph.kinds}


@pytest.mark.parametrize(
    ("model", "tied", "to"),
    [("tied", "head.weight", "token_embedding.weight"), ("gpt2", "lm_head.weight", "transformer.wte.weight")],
)
def test_tied_parameters(model: str, tied: str, to: str) -> None:
    graph = graph_of(model)
    assert {p.name: p.tied_to for p in graph.parameters if p.tied_to} == {tied: to}
    assert graph.num_parameters == sum(p.numel() for p in source_of(model).build().parameters())


@pytest.mark.parametrize("model", MODELS)
def test_parameters(model: str) -> None:
    module = source_of(model).build()
    graph = graph_of(model)
    assert {p.name: (p.shape, p.trainable) for p in graph.parameters} == {
        name: (tuple(p.shape), p.requires_grad) for name, p in module.named_parameters(remove_duplicate=False)
    }
    assert graph.identity == identity(list_parameters(module)), "a plan for the graph would not fit the module"
    for parameter in graph.parameters:
        assert parameter.block == "" or parameter.name.startswith(f"{parameter.block}.")


def test_the_parameter_outside_all_blocks_belongs_to_the_rest() -> None:
    assert [p.name for p in graph_of("odd").parameters if p.block == ""] == ["scale"]


def test_bytes_of_batch_and_buffers() -> None:
    gpt, resnet = graph_of("gpt"), graph_of("resnet")
    assert gpt.batch_bytes.at(3) == 3 * 2 * 16 * 8
    assert gpt.tokens_per_sample == 16
    assert gpt.buffer_bytes == 0
    assert resnet.batch_bytes.at(3) == 3 * (3 * 64 * 64 * 4 + 8)
    assert resnet.buffer_bytes == sum(b.numel() * b.element_size() for b in source_of("resnet").build().buffers())


# Quantities at another batch size.


@pytest.mark.parametrize(
    ("model", "precision"), [*((model, "fp32") for model in MODELS), *product(("gpt", "resnet"), ("bf16", "fp64"))]
)
def test_five_samples_are_as_if_traced_with_five(model: str, precision: Precision) -> None:
    """Quantities were learned at 2 and 3 samples; at 5 they equal a trace with 5, op by op and event by event."""
    source, graph = source_of(model), graph_of(model, precision)
    assert source.example is not None
    module = build_on_meta(source.build)
    direct = trace(module, source.example(5), source.objective, find_blocks(module), Arithmetic(precision))
    assert ops_at(graph, 5) == ops_of(direct)
    assert [
        (step.phase, segment.block, [event.num_bytes.at(5) for event in step.events], step.output_bytes.at(5))
        for segment, step in steps_of(graph)
    ] == [
        (stretch.phase, stretch.block, [entry.num_bytes for entry in stretch.memory], stretch.output_bytes)
        for stretch in find_stretches(direct)
    ]
    assert graph.batch_bytes.at(5) == direct.batch_bytes


def steps_of(graph: Graph) -> list[tuple[Segment, Pass]]:
    """The timeline with the pass of each entry."""
    kinds = graph.kind_by_block
    return [(segment, kinds[segment.block].passes[segment.number]) for segment in graph.timeline]


def ops_at(graph: Graph, samples: int) -> list[tuple[Any, ...]]:
    """Ops in order of execution, each with its figures."""
    return [
        (
            segment.block, op.name, op.kind, op.phase, op.dtype, op.module, op.region,
            *(figure.at(samples) for figure in (op.flops, op.read_bytes, op.written_bytes, op.saved_bytes)),
            *(tuple(size.at(samples) for size in shape) for shape in (*op.input_shapes, op.result_shape)),
        )
        for segment, step in steps_of(graph)
        for op in graph.kind_by_block[segment.block].ops[step.first_op : step.first_op + step.num_ops]
    ]  # fmt: skip


def ops_of(recording: Recording) -> list[tuple[Any, ...]]:
    return [
        (
            op.block, op.name, op.kind, op.phase, op.dtype, op.module, op.region,
            op.flops, op.read_bytes, op.written_bytes, op.saved_bytes, *op.input_shapes, op.result_shape,
        )
        for op in recording.ops
    ]  # fmt: skip


class Masked(nn.Module):
    """A large table of fixed size, then work that grows with the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 64)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(256, 256).tril().mean()
        with torch.no_grad():
            norm = x.repeat(1, 256).exp().mean(dim=1, keepdim=True)
        return self.linear(x) * scale / norm


def test_a_peak_of_fixed_size_does_not_hide_one_that_grows() -> None:
    """With 2 and 3 samples the table is the peak of its pass; with 4096 it is not."""
    module = nn.Sequential(Masked())
    graph = meshwright.capture(module, torch.randn(2, 3), loss=mean)
    direct = trace(module, torch.randn(4096, 3), Objective(mean, len), find_blocks(module), Arithmetic())
    expected = peak_of(entry.num_bytes for stretch in find_stretches(direct) for entry in stretch.memory)
    assert peak_of(event.num_bytes.at(4096) for _, step in steps_of(graph) for event in step.events) == expected
    passes = ([event.num_bytes.at(4096) for event in step.events] for _, step in steps_of(graph))
    assert max(peak_of(events) for events in passes if events) <= expected


def peak_of(events: Iterable[float]) -> float:
    return max(accumulate(events))


LEFT_BEHIND = {"switch": 16, "gshard": 16}
"""Two routers keep the number of choices they dropped, until the next forward."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_everything_taken_is_given_back(model: str, precision: Precision) -> None:
    """Over the whole timeline, for any number of samples; no moment has less than nothing in use."""
    events = [event.num_bytes for _, step in steps_of(graph_of(model, precision)) for event in step.events]
    for samples in (1, 8):
        levels = list(accumulate(event.at(samples) for event in events))
        assert min(levels) >= 0
        assert levels[-1] == LEFT_BEHIND.get(model, 0)


def test_the_example_batch_may_have_any_size() -> None:
    """One sample or many: the graph is the same."""
    source = source_of("gpt")
    assert source.example is not None
    graphs = {capture(source.build(), source.example(n), source.objective, "gpt").hash for n in (1, 2, 7)}
    assert len(graphs) == 1


def test_parameters_may_lie_anywhere() -> None:
    """A module with memory and one on `meta` give the same graph."""
    source = source_of("odd")
    assert source.example is not None
    real = capture(source.build(), source.example(2), source.objective, source.name)
    assert real == capture_source(source)


@pytest.mark.parametrize("kind", ["tensor", "pair", "dict"])
def test_kinds_of_batches(kind: str) -> None:
    x, labels = torch.randn(4, 5), torch.randint(7, (4,))
    batches = {"tensor": x, "pair": (x, labels), "dict": {"input": x, "labels": labels}}
    loss = mean if kind == "tensor" else None
    graph = meshwright.capture(nn.Linear(5, 7, bias=False), batches[kind], loss=loss)
    assert graph.flops(4) == 4 * 4 * 5 * 7
    assert graph.batch_bytes.at(1) == 5 * 4 + (0 if kind == "tensor" else 8)


def test_a_loss_of_the_users_own() -> None:
    graph = capture_source(resolve(f"{ASSETS}/models.py:own_loss"))
    assert graph.num_parameters == graph_of("odd").num_parameters
    assert graph.tokens_per_sample == 1


# What capture leaves alone.


@pytest.mark.parametrize("model", ["resnet", "gpt2", "frozen"])
def test_the_module_is_unchanged(model: str) -> None:
    source = source_of(model)
    assert source.example is not None
    module = source.build()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    identities = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    random = torch.get_rng_state()
    capture(module, source.example(2), source.objective)
    assert {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)} == identities
    assert {name: p.requires_grad for name, p in module.named_parameters()} == trained
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert module.training
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    source.objective.loss(call(module, source.example(2)), source.example(2)).backward()


def test_a_failed_capture_leaves_no_hook() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Linear(5, 7))
    with pytest.raises(CaptureError):
        meshwright.capture(module, torch.randn(2, 6))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not any("forward" in vars(part) for part in module.modules())


class Counting(nn.Module):
    """Sets something on itself in every forward, a tensor among it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.linear(x)
        return self.last * 2


def test_what_a_forward_sets_on_its_module_is_undone() -> None:
    module = Counting()
    meshwright.capture(module, torch.randn(2, 3), loss=mean)
    assert module.calls == 0
    assert not hasattr(module, "last")


# Refusals.


def test_a_batch_the_module_does_not_take_is_refused() -> None:
    said = r"module '1' failed in forward on fake tensors: .*Error: .*Check that the module takes the example batch"
    with pytest.raises(CaptureError, match=said):
        meshwright.capture(nn.Sequential(nn.ReLU(), nn.Linear(5, 7)), torch.randn(2, 6))


class Branches(nn.Module):
    """Works one way for two samples and another way for three."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if len(x) % 2 else self.linear(self.linear(x))


def test_work_that_depends_on_the_batch_size_is_refused() -> None:
    with pytest.raises(CaptureError, match="the module does other work for other batch sizes"):
        meshwright.capture(Branches(), torch.randn(2, 3), loss=mean)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("gbt:", ModelError, "no model is called 'gbt': did you mean 'gpt'?"),
        ("gpt:layer=2", ModelError, "has no option 'layer': did you mean 'layers'?"),
        ("gpt:layers=two", ModelError, "option layers='two' is not a whole number"),
        ("gpt:layers=0", ModelError, "option layers=0 must be at least 1"),
        ("gpt:layers", ModelError, "option 'layers' needs a value, like layers=12"),
        ("gpt:tied=maybe", ModelError, "option tied='maybe' is not true or false"),
        ("gpt:attention=flash", ModelError, "attention='flash' is not one of sdpa, eager"),
        ("llama:hidden=16,heads=4,kv_heads=3", ModelError, "heads=4 does not divide into kv_heads=3"),
        ("llama:hidden=10,heads=4", ModelError, "hidden=10 does not divide into heads=4"),
        ("llama:hidden=12,heads=4,kv_heads=2", ModelError, "rotary positions need pairs"),
        ("gpt:hidden=10,heads=3", ModelError, "hidden=10 does not divide into heads=3"),
        ("resnet:depth=20", ModelError, "depth=20 is not one of 26, 50, 101"),
        ("hf:nowhere.json", InputError, "nowhere.json: no such file"),
        (f"hf:{ASSETS}/models.py", InputError, "not valid JSON"),
        ("nowhere.py:model", InputError, "nowhere.py: no such file"),
        (f"{ASSETS}/models.py", InputError, "names no function: write path/to/file.py:function"),
        (f"{ASSETS}/models.py:frozn", InputError, "has no function 'frozn': did you mean 'frozen'?"),
        (f"{ASSETS}/models.py:raises", ModelError, "raised RuntimeError: no such weights today (line"),
        (f"{ASSETS}/models.py:not_a_model", ModelError, "returned str: return a module, (module, batch)"),
        (
            f"{ASSETS}/models.py:not_a_batch",
            ModelError,
            "returned function as its batch: give a tensor, a dict of tensors",
        ),
    ],
)
def test_wrong_model_names(name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        resolve(name)
    assert said in str(caught.value)


def test_a_module_without_a_batch_is_refused() -> None:
    with pytest.raises(ModelError, match=r"returned a module alone: return \(module, batch\)"):
        capture_source(resolve(f"{ASSETS}/models.py:alone"))


@pytest.mark.parametrize("model", ["gpt", "grouped", "resnet", "llama", "gpt2"])
def test_examples_repeat(model: str) -> None:
    """The same samples at every call, whatever their number."""
    example: Callable[[int], Any] | None = source_of(model).example
    assert example is not None
    first, again = example(4), example(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(len(tensor) == 4 for tensor in first.values())


def test_shrunk_models_keep_their_architecture() -> None:
    large = resolve("gpt:layers=96,hidden=12288,heads=96,seq=2048,tied=true")
    small = capture_source(large.small())
    assert small.num_parameters < 1e5
    assert len(small.repeated_blocks) == 4
    assert any(parameter.tied_to for parameter in small.parameters)
    assert len(capture_source(resolve("resnet:depth=101,width=2").small()).repeated_blocks) == 8
    grouped = capture_source(resolve("llama:layers=32,hidden=4096,heads=32,kv_heads=8,seq=4096").small())
    assert grouped.num_parameters < 1e5
    assert len(grouped.repeated_blocks) == 4
