"""A vision transformer: an image cut into patches, a class token, learned positions, pre-norm blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.models.bert import MLP, Attention, TransformerOptions

NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class ViTOptions(TransformerOptions):
    image: int = 224
    """Height and width of the image."""
    patch: int = 16
    """Height and width of a patch."""
    classes: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise ValueError(f"image={self.image} does not divide into patches of patch={self.patch}")

    @property
    def num_patches(self) -> int:
        return (self.image // self.patch) ** 2


class Embedding(nn.Module):
    """Patches as vectors, behind a class token, each with its position."""

    def __init__(self, options: ViTOptions) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, options.hidden, options.patch, stride=options.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, options.hidden))
        self.position = nn.Parameter(torch.empty(1, options.num_patches + 1, options.hidden))
        nn.init.normal_(self.position, std=0.02)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch(pixel_values).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.position


class Block(nn.Module):
    def __init__(self, options: ViTOptions) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(options.hidden, eps=NORM_EPSILON)
        self.attention = Attention(options)
        self.mlp_norm = nn.LayerNorm(options.hidden, eps=NORM_EPSILON)
        self.mlp = MLP(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ViT(nn.Module):
    def __init__(self, options: ViTOptions) -> None:
        super().__init__()
        self.embedding = Embedding(options)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.hidden, eps=NORM_EPSILON)
        self.head = nn.Linear(options.hidden, options.classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.embedding(pixel_values)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
