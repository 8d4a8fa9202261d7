"""Models that are hard to cut into stages: `tests/assets/pipelines.py:encoder_decoder` and others, good and bad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, VOCAB, LENGTH = 16, 4, 31, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, other: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(other), self.value(other)
        parts = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (query, key, value)]
        weights = (parts[0] @ parts[1].transpose(-2, -1) + bias).softmax(-1)
        return self.out((weights @ parts[2]).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """The first of a stack makes the bias of positions; all hand it on."""

    def __init__(self, first: bool, crosses: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.crossing = Attention() if crosses else None
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.positions = nn.Embedding(2 * LENGTH, HEADS) if first else None

    def forward(
        self, x: Tensor, mask: Tensor, bias: Tensor | None = None, *, encoded: Tensor | None = None, seen: Any = None
    ) -> tuple[Tensor, Tensor]:
        if self.positions is not None:
            places = torch.arange(x.shape[1], device=x.device)
            bias = self.positions(places[:, None] - places[None, :] + LENGTH).permute(2, 0, 1)[None] + mask
        assert bias is not None
        x = x + self.attention(self.norm(x), self.norm(x), bias)
        if self.crossing is not None:
            assert encoded is not None
            x = x + self.crossing(self.norm(x), encoded, seen)
        return x + self.down(torch.relu(self.up(x))), bias


class Stack(nn.Module):
    def __init__(self, embedding: nn.Embedding, depth: int, crosses: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(Layer(number == 0, crosses) for number in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, mask: Tensor, encoded: Tensor | None = None, seen: Any = None) -> dict[str, Tensor]:
        x, bias = self.embedding(ids), None
        for layer in self.layers:
            x, bias = layer(x, mask, bias, encoded=encoded, seen=seen)
        return {"last": self.norm(x)}


class EncoderDecoder(nn.Module):
    """In the manner of T5: one embedding for encoder and decoder, biases that the first layer of a stack makes."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder = Stack(self.shared, depth, crosses=False)
        self.decoder = Stack(self.shared, depth, crosses=True)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> dict[str, Tensor]:
        padding = torch.zeros(input_ids.shape, device=input_ids.device).masked_fill(input_ids == 0, -1e9)[:, None, None]
        future = torch.full((LENGTH, LENGTH), -1e9, device=input_ids.device).triu(1)[None, None]
        dtype = self.head.weight.dtype
        encoded = self.encoder(input_ids, padding.to(dtype))["last"]
        x = self.decoder(decoder_input_ids, future.to(dtype), encoded, padding.to(dtype))["last"]
        x = x * WIDTH**-0.5
        return {"logits": self.head(x), "encoded": encoded}


def texts(samples: int = 16) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    names = ("input_ids", "decoder_input_ids", "labels")
    return {name: torch.randint(VOCAB, (samples, LENGTH), generator=random) for name in names}


def encoder_decoder() -> tuple[nn.Module, Any]:
    return EncoderDecoder(), texts()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.project(self.norm(x)))


class Skipping(nn.Module):
    """The head sees the embedding again, scaled by a parameter that lies in no block; some of it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.enter = nn.Linear(3, WIDTH)
        self.parts = nn.ModuleList(Part() for _ in range(4))
        self.leave = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x) * self.mix
        x = first
        for part in self.parts:
            x = part(x)
            x *= 2
            x.div_(2)
        x = x + first.flatten(1).view_as(x)
        return self.leave(x * self.mix)


def points(samples: int = 16) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, generator=random), torch.randint(5, (samples,), generator=random)


def skipping() -> tuple[nn.Module, Any]:
    return Skipping(), points()


class Backwards(Skipping):
    """Its last block comes first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * self.mix
        for part in reversed(self.parts):
            x = part(x)
        return self.leave(x)


def backwards() -> tuple[nn.Module, Any]:
    return Backwards(), points()


class Peeking(Skipping):
    """Looks at a value between two blocks: a stage that does not have it could not follow."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * self.mix
        for part in self.parts:
            x = part(x) if x.sum() > 0 else part(-x)
        return self.leave(x)


def peeking() -> tuple[nn.Module, Any]:
    return Peeking(), points()
