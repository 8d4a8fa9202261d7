"""A multilayer perceptron that classifies vectors: residual blocks of two layers each."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MLPOptions:
    layers: int = 8
    """Blocks; each holds two matrices."""
    inputs: int = 784
    """Numbers in a sample."""
    hidden: int = 1024
    mlp: int = 4
    """Width inside a block in multiples of hidden."""
    classes: int = 10
    dropout: float = 0.0


class Block(nn.Module):
    def __init__(self, options: MLPOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.hidden)
        self.expand = nn.Linear(options.hidden, options.mlp * options.hidden)
        self.contract = nn.Linear(options.mlp * options.hidden, options.hidden)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.contract(F.gelu(self.expand(self.norm(x)))))


class MLP(nn.Module):
    def __init__(self, options: MLPOptions) -> None:
        super().__init__()
        self.enter = nn.Linear(options.inputs, options.hidden)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.hidden)
        self.head = nn.Linear(options.hidden, options.classes)

    def forward(self, features: Tensor) -> Tensor:
        x = self.enter(features)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
