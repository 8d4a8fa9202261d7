"""Models as a user would write them: `tests/assets/models.py:frozen` and others, good and bad."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.bert import BERT, BERTOptions
from meshwright.models.examples import TextShape, random_text
from meshwright.models.objective import IGNORED_LABEL

ODD = 7
CLASSES = 5


class Residual(nn.Module):
    """No size divides by 2 or 4."""

    def __init__(self, width: int = ODD) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, depth: int = 3, width: int = ODD) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.enter = nn.Linear(3, width)
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def example(samples: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, generator=random), torch.randint(CLASSES, (samples,), generator=random)


def odd() -> tuple[nn.Module, Any]:
    return Tower(), example(64)


def frozen() -> tuple[nn.Module, Any]:
    """The entrance, one whole layer and the norms of another are not trained."""
    tower = Tower()
    for part in (tower.enter, tower.layers[1], tower.layers[2].norm):
        part.requires_grad_(False)
    return tower, example(64)


def padded() -> tuple[nn.Module, Any]:
    """Texts of many lengths: the mask travels with them."""
    shape = TextShape(seq=12, vocab=32, task="masked")
    batch: Any = random_text(shape)(64)
    lengths = 4 + torch.arange(64)[:, None] % 9
    mask = (torch.arange(12) < lengths).long()
    labels = batch["labels"].masked_fill(mask == 0, IGNORED_LABEL)
    return BERT(BERTOptions(layers=2, hidden=32, heads=4, seq=12, vocab=32)), {
        **batch,
        "attention_mask": mask,
        "labels": labels,
    }


class HeadFirst(nn.Module):
    """Registers its parameters in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(512, 1024)
        self.enter = nn.Linear(3, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


def head_first() -> tuple[nn.Module, Any]:
    return HeadFirst(), example(64)


class Unused(Tower):
    """Holds a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


def unused() -> tuple[nn.Module, Any]:
    return Unused(), example(64)


class Experts(nn.Module):
    """Each sample has one expert; those that no sample chooses are not called. The fifth never is."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Residual() for _ in range(5))

    def forward(self, h: Tensor, chosen: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                h = h.index_add(0, rows, expert(h[rows]).to(h.dtype))
        return h


class Choosing(Tower):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) * self.scale
        for layer in self.layers:
            h = layer(h, x[:, 0].long())
        return self.leave(h)


def choosing(depth: int = 2) -> tuple[nn.Module, Any]:
    """In the first eight samples nobody chooses the fourth expert, and only the last four the third."""
    x, labels = example(24)
    x[:, 0] = torch.tensor([0, 1, 0, 1, 0, 2, 2, 0, 3, 0, 3, 1, 1, 0, 0, 1, 0, 1, 0, 0, 2, 3, 3, 2]) + 0.5
    return Choosing(depth), (x, labels)


def choosing_blocks() -> tuple[nn.Module, Any]:
    """Of one layer of experts, each expert is taken for a block."""
    return choosing(depth=1)


class Twice(Choosing):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) * self.scale
        h = self.layers[0](h, x[:, 0].long())
        return self.leave(self.layers[0](h, x[:, 0].long()))


def choosing_twice() -> tuple[nn.Module, Any]:
    """Each chosen expert is called two times."""
    return Twice(1), choosing()[1]


def own_loss() -> tuple[nn.Module, Any, Any]:
    """Regression with a loss of the user's own."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output[:, 0] - batch["target"]).abs().mean()

    random = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(8, 3, generator=random), "target": torch.randn(8, generator=random)}

    class Own(Tower):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return super().forward(x)

    return Own(), batch, loss


class Noisy(Tower):
    """Draws from the operating system in every forward: no two runs agree."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + int.from_bytes(os.urandom(2), "big") / 2**16)


def noisy() -> tuple[nn.Module, Any]:
    return Noisy(), example(64)


class Gate(nn.Module):
    """Reads a value of its input: fake tensors have none, so it is guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)


def data_dependent() -> tuple[nn.Module, Any]:
    return Gated(), example()


class Reader(Gate):
    """Reads the memory of its input: cannot be followed on fake tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(x.detach().numpy().sum())


class Reading(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Reader()


def reads_memory() -> tuple[nn.Module, Any]:
    return Reading(), example()


class FailsLate(Tower):
    """On rank 1, the fourth training forward raises."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += x.device.type != "meta" and os.environ.get("RANK") == "1"
        if self.num_forwards == 4:
            raise ArithmeticError("the gears slipped")
        return super().forward(x)


def fails_late() -> tuple[nn.Module, Any]:
    return FailsLate(), example(64)


class Slow(Tower):
    """Leaves time for a signal between two steps."""

    def forward(self, x: Tensor) -> Tensor:
        if "RANK" in os.environ:
            time.sleep(0.1)
        return super().forward(x)


def slow() -> tuple[nn.Module, Any]:
    return Slow(), example(64)


def raises() -> nn.Module:
    raise RuntimeError("no such weights today")


def alone() -> nn.Module:
    return Tower()


def not_a_model() -> str:
    return "surprise"


def not_a_batch() -> tuple[nn.Module, object]:
    return Tower(), lambda num_samples: torch.zeros(num_samples, 4)


class Hangs(Tower):
    """On rank 1, the third training forward never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += x.device.type != "meta" and os.environ.get("RANK") == "1"
        if self.num_forwards == 3:
            time.sleep(3600)
        return super().forward(x)


def hangs() -> tuple[nn.Module, Any]:
    return Hangs(), example(64)


class Overflow(torch.autograd.Function):
    """Finite in forward, infinite in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class Breaks(nn.Module):
    """On the rank, in the forward and in the direction that the environment names (RANK,FORWARD,DIRECTION)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        rank, forward, direction = os.environ.get("BREAKS", "1,2,forward").split(",")
        self.num_forwards += x.device.type != "meta" and os.environ.get("RANK") == rank
        if self.num_forwards != int(forward):
            return x
        return x * float("nan") if direction == "forward" else Overflow.apply(x)


class Broken(Tower):
    """Its second layer breaks between its two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layers[1]
        layer.down = nn.Sequential(Breaks(), layer.down)  # type: ignore[assignment]


def broken() -> tuple[nn.Module, Any]:
    return Broken(), example(64)


class HangsInNative(Hangs):
    """The same, in native code that keeps Python's lock: no other thread of the rank can run."""

    def forward(self, x: Tensor) -> Tensor:
        if self.num_forwards == 2:
            ctypes.PyDLL("libc.so.6").sleep(60)
        return super().forward(x)


def hangs_in_native() -> tuple[nn.Module, Any]:
    return HangsInNative(), example(64)


class Sometimes(Tower):
    """Samples whose first feature is large go through a branch of their own: a rank, or a step, may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(ODD, ODD)

    def forward(self, x: Tensor) -> Tensor:
        large = x[:, 0] > 1.0
        x = self.enter(x) * self.scale
        if large.any():
            x = torch.where(large[:, None], self.branch(x), x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def sometimes() -> tuple[nn.Module, Any]:
    inputs, labels = example(64)
    inputs[:, 0] = -inputs[:, 0].abs()
    inputs[::8, 0] = 2.0  # of every eight samples the first one: two ranks with four each never agree
    return Sometimes(), (inputs, labels)


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of low rank, zero at first."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> tuple[nn.Module, Any]:
    """Only the adapters and the head are trained."""
    tower = Tower().requires_grad_(False)
    for layer in tower.layers:
        assert isinstance(layer, Residual)
        layer.up, layer.down = LowRank(layer.up), LowRank(layer.down)  # type: ignore[assignment]
    tower.leave.requires_grad_(True)
    return tower, example(64)


class PackedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.inward(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return x + self.outward(mixed.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """Several texts in one row: each attends to itself alone, and counts its positions from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 16)
        self.positions = nn.Embedding(12, 16)
        self.layers = nn.ModuleList(PackedAttention(16, 4) for _ in range(2))
        self.head = nn.Linear(16, 31)

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def packed() -> tuple[nn.Module, Any]:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(31, (64, 12), generator=random)
    cut = torch.randint(3, 9, (64, 1), generator=random)
    place = torch.arange(12)[None, :].expand(64, 12)
    text = (place >= cut).long()
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    batch = {
        "input_ids": ids,
        "position_ids": torch.where(text == 1, place - cut, place),
        "mask": (text[:, :, None] == text[:, None, :]) & causal,
        "labels": ids.roll(-1, 1).masked_fill(text != text.roll(-1, 1), -100),
    }
    return Packed(), batch
