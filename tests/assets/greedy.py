"""A model that asks for more memory than there is, once it has trained a few steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        self.calls += type(x) is Tensor  # while it is captured, tensors are fake
        if self.calls > 3:
            x = x + torch.empty(2**52)[0]
        return self.head(x)


def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Greedy(), (torch.randn(8, 64), torch.randint(4, (8,)))
