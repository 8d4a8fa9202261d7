"""Of blocks that are alike a few are followed: the graph is the one that following all of them gives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from cases import ASSETS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.capturing.capture import Subject, capture_source
from meshwright.capturing.groups import CannotSkip, Group, find_groups
from meshwright.capturing.recording import Recording
from meshwright.capturing.stand_ins import Arithmetic
from meshwright.core.graph import Graph, Precision
from meshwright.models.faked.build import build_on_meta
from meshwright.models.objective import Objective
from meshwright.models.source import resolve

DEPTH = 6
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 48,
    "num_layers": DEPTH, "num_decoder_layers": DEPTH, "num_heads": 4, "vocab_size": 67, "n_positions": 16,
    "is_encoder_decoder": True,
}  # fmt: skip


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.mean()


def subject_of(model: str, folder: Path, precision: Precision) -> Subject:
    """A model of the reference ones, or a Hugging Face config with more layers than its asset has."""
    if model in ("llama", "t5"):
        config = (
            T5 if model == "t5" else json.loads((ASSETS / "llama-tiny.json").read_text()) | {"num_hidden_layers": DEPTH}
        )
        path = folder / f"{model}.json"
        path.write_text(json.dumps(config))
        model = f"hf:{path}"
    source = resolve(model)
    assert source.example is not None
    return Subject(build_on_meta(source.build), source.example(2), source.objective, Arithmetic(precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        f"gpt:layers={DEPTH},hidden=32,heads=4,seq=16,vocab=61",
        f"gpt:layers={DEPTH},hidden=32,heads=4,seq=16,vocab=61,tied=true,attention=eager,dropout=0.1",
        f"llama:layers={DEPTH},hidden=32,heads=4,kv_heads=2,intermediate=48,seq=16,vocab=61",
        "resnet:depth=50,image=64,classes=10,channels=8",
        f"moe:layers={DEPTH},hidden=32,heads=4,seq=16,vocab=61,experts=4",
        "llama",
        "t5",
    ],
)
def test_skipping_changes_nothing(model: str, precision: Precision, tmp_path: Path) -> None:
    subject = subject_of(model, tmp_path, precision)
    groups = find_groups(subject.module, subject.blocks)
    assert groups
    assert subject.trace(2, groups).representatives, "nothing was skipped"
    assert subject.graph("skipping", groups) == msgspec.structs.replace(subject.graph("all", []), model="skipping")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def subject(module: nn.Module) -> Subject:
    return Subject(module, torch.randn(2, 5, 8), Objective(mean, len), Arithmetic())


def both(module: nn.Module) -> tuple[Graph, Graph]:
    made = subject(module)
    return made.follow("", find_groups(module, made.blocks)), made.graph("", [])


def first_trace(module: nn.Module) -> Recording:
    made = subject(module)
    return made.trace(2, find_groups(module, made.blocks))


def test_which_blocks_are_followed() -> None:
    assert first_trace(Stack()).representatives == {f"layers.{number}": "layers.1" for number in (2, 3, 4)}


class Indexed(Layer):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.index = Indexed.count
        Indexed.count += 1


class IndexedStack(Stack):
    layer = Indexed

    def __init__(self) -> None:
        Indexed.count = 0
        super().__init__()


def groups_of(module: nn.Module) -> list[Group]:
    made = subject(module)
    return find_groups(module, made.blocks)


def test_a_blocks_own_position_does_not_make_it_different() -> None:
    assert [len(group.names) for group in groups_of(IndexedStack())] == [DEPTH]


def changed(change: Callable[[Any], None]) -> nn.Module:
    module = Stack()
    change(module.layers[3])
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "linear", nn.Linear(8, 8, bias=False)),
        lambda layer: setattr(layer.norm, "eps", 1e-3),
        lambda layer: layer.norm.requires_grad_(False),
        lambda layer: layer.norm.eval(),
        lambda layer: layer.norm.register_forward_hook(lambda *_: None),
        lambda layer: setattr(layer, "norm", nn.RMSNorm(8)),
        lambda layer: setattr(layer, "act", torch.tanh),
    ],
)
def test_what_makes_a_block_different(change: Callable[[Any], None]) -> None:
    (group,) = groups_of(changed(change))
    assert "layers.3" not in group.names
    assert len(group.names) == DEPTH - 1


def test_blocks_that_share_a_parameter_are_followed() -> None:
    module = Stack()
    module.layers[4].linear.weight = module.layers[0].linear.weight
    (group,) = groups_of(module)
    assert group.names == tuple(f"layers.{number}" for number in (1, 2, 3, 5))


class Recomputing(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Leaving(Layer):
    """Leaves a loss of its own behind, which the stack adds up."""

    def forward(self, x: Tensor) -> Tensor:
        self.own_loss = x.square().mean()
        return super().forward(x)


class Adding(Stack):
    layer = Leaving

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(layer.own_loss for layer in self.layers)


class Again(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Growing(Stack):
    """Blocks are called with inputs of other shapes."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([layer(x), x[:, :1]], dim=1)
        return x


class Replacing(Stack):
    """What a block leaves behind is there until the next one has run."""

    class Noting(Layer):
        last: ClassVar[dict[str, Tensor]] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.last["sum"] = x.detach().sum()
            return super().forward(x)

    layer = Noting


class Penalised(Stack):
    """Reads the weights of all blocks from outside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(weight.abs().mean() for weight in self.layers.parameters())


def test_a_models_own_recompute_is_left_out_and_its_blocks_are_skipped() -> None:
    assert first_trace(Recomputing()).representatives == first_trace(Stack()).representatives
    few, every = both(Recomputing())
    assert few == every
    assert few.flops(3) == both(Stack())[1].flops(3)


@pytest.mark.parametrize("stack", [Adding, Again, Growing, Replacing, Penalised])
def test_blocks_that_cannot_be_skipped_are_followed(stack: type[nn.Module]) -> None:
    module = stack()
    with pytest.raises(CannotSkip):
        first_trace(module)
    few, every = both(module)
    assert few == every
    assert all(parameter.grad is None for parameter in module.parameters())


class Frozen(Stack):
    """The lower half is not trained: nothing of it runs in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2 * DEPTH))
        for layer in self.layers[:DEPTH]:
            layer.requires_grad_(False)


class Shared(Stack):
    """All blocks read one tensor besides their input, and its gradient comes from all of them."""

    class Reading(Layer):
        def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x) * shift, shift

    layer = Reading

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift(x)
        for layer in self.layers:
            x, shift = layer(x, shift)
        return x


class Counting(Stack):
    """Every block notes a number for whoever asks after the step."""

    class Noting(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.noted = (x.detach() > 0).sum()
            return super().forward(x)

    layer = Noting


class Summing(Stack):
    """A sum goes through all blocks, each of which adds its own to it."""

    class Adding(Layer):
        def forward(self, x: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            made = super().forward(x)
            return made, loss + made.square().mean()

    layer = Adding

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x, loss)
        return x + loss


@pytest.mark.parametrize("stack", [Stack, IndexedStack, Frozen, Shared, Counting, Summing])
def test_awkward_stacks(stack: type[nn.Module]) -> None:
    module = stack()
    assert first_trace(module).representatives
    few, every = both(module)
    assert few == every


def test_the_forward_of_blocks_is_theirs_again() -> None:
    module = Stack()
    both(module)
    assert not any("forward" in vars(layer) for layer in module.layers)


def test_gradient_order_names_the_parameters_of_skipped_blocks() -> None:
    graph = capture_source(resolve("gpt:layers=8,hidden=32,heads=4,seq=16,vocab=61"))
    assert sorted(graph.gradient_order) == sorted(parameter.name for parameter in graph.parameters)
    blocks = [name.split(".")[1] for name in graph.gradient_order if name.startswith("blocks.")]
    assert list(dict.fromkeys(blocks)) == [str(number) for number in reversed(range(8))]


def test_a_deep_model_costs_no_more_ops_than_a_shallow_one() -> None:
    """The largest model of the field is followed in seconds because most of it is not."""
    few, many = (
        subject_of(f"gpt:layers={layers},hidden=32,heads=4,seq=16,vocab=61", Path(), "fp32") for layers in (6, 60)
    )
    counts = [len(made.trace(2, find_groups(made.module, made.blocks)).ops) for made in (few, many)]
    assert counts[0] == counts[1]


def test_the_largest_model_is_captured_in_seconds() -> None:
    started = time.perf_counter()
    graph = capture_source(resolve("gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"))
    assert graph.num_parameters == 175_244_992_512
    assert len(graph.timeline) > 2 * 96
    assert time.perf_counter() - started < 20, "it takes half a second on an idle machine, once torch is loaded"
