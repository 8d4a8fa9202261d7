"""Models that leave out blocks at random (LayerDrop), as people write it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, VOCAB, SEQ = 16, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Dropping(nn.Module):
    def __init__(self, by_python: bool, p: float = 0.5) -> None:
        super().__init__()
        self.by_python, self.p = by_python, p
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            drawn = random.random() if self.by_python else torch.rand([])
            if self.training and drawn < self.p:
                continue
            x = block(x)
        return self.head(x)


def _batch() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(VOCAB, (2, 4, SEQ), generator=drawn)
    return {"ids": ids, "labels": labels}


def by_python() -> tuple[nn.Module, Any]:
    return Dropping(by_python=True), _batch()


def by_torch() -> tuple[nn.Module, Any]:
    return Dropping(by_python=False), _batch()


def after_frozen() -> tuple[nn.Module, Any]:
    """What reaches the first blocks takes no gradient."""
    module = Dropping(by_python=False)
    module.embed.requires_grad_(False)
    return module, _batch()
