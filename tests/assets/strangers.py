"""Models as people write them: each has one habit that a follower of modules must live with."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

VOCAB, SEQ, WIDTH = 32, 8, 16
TABLES: dict[int, Tensor] = {}


def text(module: nn.Module) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCAB, (4, SEQ + 1), generator=torch.Generator().manual_seed(0), device="cpu")
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale(x)

    def scale(self, x: Tensor) -> Any:
        return 1.0


class Lambda(MLP):
    """A function that the constructor wrote, as minGPT's MLP; and a static method of it, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        parts = nn.ModuleDict({"fc": nn.Linear(WIDTH, WIDTH), "proj": nn.Linear(WIDTH, WIDTH)})
        self.more = parts
        self.function: Callable[[Tensor], Tensor] = lambda x: parts["proj"](torch.tanh(parts["fc"](x)))
        self.static = staticmethod(self.function)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.function(x) + 0.5 * self.static(x)


class OwnDevice(MLP):
    """Keeps its device, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.device = next(self.parameters()).device
        self.slopes = torch.linspace(0.5, 1.0, SEQ)[:, None]

    def scale(self, x: Tensor) -> Any:
        return self.slopes.to(x.device) + torch.arange(x.shape[1], device=self.device)[:, None]


class Reads(MLP):
    """Its constructor reads a value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0.0, 1.0, 3)[1].item()

    def scale(self, x: Tensor) -> Any:
        return self.rate


class Lists(OwnDevice):
    """Keeps tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.ones(SEQ, 1), torch.ones(1)]

    def scale(self, x: Tensor) -> Any:
        return (self.tables[0] * self.tables[1]).to(x)


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)[:, None].to(x.dtype) / SEQ


class Attribute(MLP):
    table: Tensor | None = None

    def scale(self, x: Tensor) -> Any:
        if self.table is None:
            self.table = positions(x)
        return self.table


class InDict(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def scale(self, x: Tensor) -> Any:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = positions(x)
        return self.tables[x.shape[1]]


class Buffer(MLP):
    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def scale(self, x: Tensor) -> Any:
        if self.table is None:
            self.register_buffer("table", positions(x), persistent=False)
        return self.table


class Global(MLP):
    def scale(self, x: Tensor) -> Any:
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = positions(x)
        return TABLES[x.shape[1]]


@functools.lru_cache
def kept_positions(length: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(length)[:, None] / SEQ).to(dtype)


class Kept(MLP):
    def scale(self, x: Tensor) -> Any:
        return kept_positions(x.shape[1], x.dtype)


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A cache behind another function, as libraries have it for methods."""
    cached = functools.lru_cache(maxsize=2)(function)

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        return cached(*arguments)

    return run


class KeptMethod(MLP):
    @staticmethod
    @kept
    def positions(length: int) -> Tensor:
        return torch.arange(length)[:, None] / SEQ

    def scale(self, x: Tensor) -> Any:
        return self.positions(x.shape[1]).to(x.dtype)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def function() -> Any:
    return text(Model(Lambda))


def own_device() -> Any:
    return text(Model(OwnDevice))


def reads() -> Any:
    return text(Model(Reads))


def lists() -> Any:
    return text(Model(Lists))


def cached_method() -> Any:
    return text(Model(KeptMethod))


def cached_attribute() -> Any:
    return text(Model(Attribute))


def cached_dict() -> Any:
    return text(Model(InDict))


def cached_buffer() -> Any:
    return text(Model(Buffer))


def cached_global() -> Any:
    return text(Model(Global))


def cached_function() -> Any:
    return text(Model(Kept))


class Numbered(nn.Module):
    """No list at all."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB)  # registered before what runs first
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layer1, self.layer2, self.layer3, self.layer4 = MLP(), MLP(), MLP(), MLP()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer4(self.layer3(self.layer2(self.layer1(self.table(tokens))))))


class Backwards(Model):
    """Runs its layers from the last to the first."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class InParts(Model):
    """Calls the parts of its layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block.down(torch.relu(block.up(block.norm(x))))
        return self.head(x)


class InDicts(nn.Module):
    """Layers in a dict by name, as torchtitan keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({f"layer_{number}": MLP() for number in range(4)})
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


class OfLists(nn.Module):
    """A list of lists of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        feed = [nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(4)]
        self.layers = nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), one]) for one in feed])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for norm, feed in self.layers:
            x = x + feed(norm(x))
        return self.head(x)


def numbered() -> Any:
    return text(Numbered())


def backwards() -> Any:
    return text(Backwards(MLP))


def in_parts() -> Any:
    return text(InParts(MLP))


def in_dicts() -> Any:
    return text(InDicts())


def of_lists() -> Any:
    return text(OfLists())


def plain_sequential() -> Any:
    """The README's own example."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(4, 8, generator=random, device="cpu")
    classes = torch.randint(10, (4,), generator=random, device="cpu")
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 10)), (features, classes)


class Odd(nn.Module):
    """A part that tp=2 divides and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))
        self.odd = nn.Sequential(nn.Linear(WIDTH, 17), nn.ReLU(), nn.Linear(17, WIDTH))
        self.shapes = nn.Sequential(nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.even(x)
        wide = self.shapes[0](x)
        if wide.stride(1) != 24:
            raise ValueError(f"expected 24 features in a row, got {wide.stride(1)}")
        x = x + self.shapes[1](wide)
        return x + self.odd(x)


def odd_parts() -> Any:
    return text(Model(Odd))


class Deep(nn.Module):
    """Sixty-four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class DeepCounted(Deep):
    """Numbers its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(64):
            x = x + self.blocks[number](x)
        return x


def deep() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    return (
        Deep(),
        (torch.ones(2, 64), torch.zeros(2, 64)),
        lambda output, batch: nn.functional.mse_loss(output, batch[1]),
    )


def deep_counted() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    return (
        DeepCounted(),
        (torch.ones(2, 64), torch.zeros(2, 64)),
        lambda output, batch: nn.functional.mse_loss(output, batch[1]),
    )


# ---------------------------------------------------------------- how a file builds its model


class Prior(nn.Module):
    """Weights drawn by numpy and by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])
        with torch.no_grad():
            for block, _ in self.blocks:
                block.weight.copy_(torch.from_numpy(numpy.random.randn(16, 16) * 0.2))
                block.bias.fill_(random.random())

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


KEPT = Prior()


def drawn_elsewhere() -> Any:
    return text(Prior())


def kept_in_the_file() -> Any:
    return text(KEPT)


def orthogonal_weights() -> Any:
    made = Prior()
    for block, _ in made.blocks:
        nn.utils.parametrizations.orthogonal(block)
    return text(made)


def pruned_weights() -> Any:
    made = Prior()
    for block, _ in made.blocks:
        torch.nn.utils.prune.l1_unstructured(block, "weight", amount=0.3)
    return text(made)


def without_sizes() -> Any:
    return text(nn.Sequential(nn.Embedding(32, 16), nn.LazyLinear(32)))


def with_a_past() -> Any:
    made = Prior()
    made.turned = made.head.weight.t() * 2
    return text(made)


def nested() -> Any:
    module, (ids, labels) = text(Prior())
    return module, {"inputs": {"ids": ids}, "labels": labels}


class Counting(Prior):
    """Raises where a part holds no parameters, as other stages' blocks do not."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if not list(block.parameters()):
                raise LookupError(f"block {number} is empty")
        return super().forward(x)


def counting() -> Any:
    return text(Counting())
