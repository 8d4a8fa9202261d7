"""What modules leave behind: losses beside the output, buffers that forward moves, weights that are made anew in every forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

WIDTH, INNER, SEQ, VOCAB, DEPTH = 16, 32, 8, 24, 4


def batch(samples: int = 8) -> dict[str, Tensor]:
    text = torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {"x": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithAuxiliary(Block):
    """Sets a loss of its own, which the model reads afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        self.aux_loss = y.pow(2).mean()
        return x + y


class AuxiliaryInOutput(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(x)
        return logits, torch.stack([block.aux_loss for block in self.blocks]).sum()


def _with_auxiliary(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output[0].flatten(0, -2), batch["labels"].flatten()) + 0.1 * output[1]


class Counting(Block):
    """A running mean of its input, which the output depends on, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
                self.calls += 1
        return super().forward(x - self.mean)


class Codebook(nn.Module):
    """VQ with codes that are moving averages (a buffer), straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        nearest = (flat[:, None] - self.codes[None]).pow(2).sum(-1).argmin(1)
        chosen = self.codes[nearest].view_as(x)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(nearest, 8).to(x.dtype)
                means = one_hot.t() @ flat / one_hot.sum(0).clamp(min=1)[:, None]
                self.codes.mul_(0.9).add_(means, alpha=0.1)
        return x + (chosen - x).detach()


class VectorQuantised(Stack):
    def __init__(self) -> None:
        super().__init__([Block() for _ in range(DEPTH)])
        self.codebook = Codebook()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = self.codebook(x)
        return self.head(x)


class Teacher(nn.Module):
    """BYOL's and DINO's form: a copy without gradient, moved towards the student in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Stack([Block() for _ in range(DEPTH)])
        self.teacher = Stack([Block() for _ in range(DEPTH)])
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.teacher(x)
        return self.student(x) - 0.5 * target


class HiddenTeacher(Stack):
    """A frozen network in a plain list, so that its weights are no part of the state dict."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(DEPTH)])
        self.hidden = [Stack([Block() for _ in range(DEPTH)]).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.hidden[0](x)
        return super().forward(x) + 0.5 * taught


class Cached(Block):
    """A bias that is made at the first forward and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.bias_cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias_cache is None or self.bias_cache.shape[0] < x.shape[1]:
            self.bias_cache = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None] / 100
        return super().forward(x + self.bias_cache[: x.shape[1]])


class Listing(Block):
    """Appends what it made to a list of the model, which reads it after all blocks."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept.append(y)
        return y


class Collecting(Stack):
    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        super().__init__([Listing(self.kept) for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        last = super().forward(x)
        return last + self.head(torch.stack(self.kept).mean(0))


class Unreached(Stack):
    """Has a head no loss reaches."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(DEPTH)])
        self.other = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.other(x.detach())


class Rezero(Block):
    """Scaled by a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.down(F.gelu(self.up(self.norm(x))))


class Writing(Block):
    """Writes into tensors by index."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, ::2] = self.down(F.gelu(self.up(self.norm(x))))[:, ::2]
        y[:, 1::2] = x[:, 1::2] * 0.5
        y[..., 0] += 1.0
        return x + y


def _changed(change) -> nn.Module:
    block = Block()
    block.up, block.down = change(block.up), change(block.down)
    return block


def weight_norm_old():
    return Stack([_changed(weight_norm) for _ in range(DEPTH)]), batch()


def weight_norm_parametrized():
    return Stack([_changed(parametrizations.weight_norm) for _ in range(DEPTH)]), batch()


def spectral_norm_old():
    return Stack([_changed(spectral_norm) for _ in range(DEPTH)]), batch()


def spectral_norm_parametrized():
    return Stack([_changed(parametrizations.spectral_norm) for _ in range(DEPTH)]), batch()


def auxiliary_loss():
    return AuxiliaryInOutput([WithAuxiliary() for _ in range(DEPTH)]), batch(), _with_auxiliary


def buffers_in_forward():
    return Stack([Counting() for _ in range(DEPTH)]), batch()


def codebook():
    return VectorQuantised(), batch()


def ema_teacher():
    return Teacher(), batch()


def hidden_teacher():
    return HiddenTeacher(), batch()


def cache_at_first_forward():
    return Stack([Cached() for _ in range(DEPTH)]), batch()


def list_of_outputs():
    return Collecting(), batch()


def unreached_head():
    return Unreached(), batch()


def rezero():
    return Stack([Rezero() for _ in range(DEPTH)]), batch()


def writes_by_index():
    return Stack([Writing() for _ in range(DEPTH)]), batch()
