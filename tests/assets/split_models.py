"""Models of which one part holds a function that cannot run on parts of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, CLASSES = 16, 6


class Inverting(nn.Module):
    """A matrix of what it reads is inverted between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x).tanh()
        square = wide.unflatten(-1, (8, 8)) * 0.1 + 3.0 * torch.eye(8, dtype=x.dtype)
        return self.down(torch.linalg.inv(square).flatten(-2))  # type: ignore[no-any-return]


class Choosing(nn.Module):
    """Which values are large is read off the data."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        share = 1.0 if torch.nonzero(wide > 0).shape[0] else 0.5  # the same for any share of the batch
        return self.down(wide.tanh()) * share  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.odd, self.mlp = odd, MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.odd(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Tower(nn.Module):
    def __init__(self, odd: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(odd()) for _ in range(2))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)  # type: ignore[no-any-return]


def example(samples: int = 16) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(samples, WIDTH, generator=random), torch.randint(CLASSES, (samples,), generator=random)


def inverting() -> tuple[nn.Module, Any]:
    return Tower(Inverting), example()


def choosing() -> tuple[nn.Module, Any]:
    return Tower(Choosing), example()
