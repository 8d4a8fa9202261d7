"""A decoder-only transformer in the manner of Llama: RMS norms, rotary positions, grouped keys and values, a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.bert import joined_heads, split_heads

ROTARY_BASE = 10000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class LlamaOptions:
    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    """Heads of keys and values; each serves heads / kv_heads queries."""
    intermediate: int = 8192
    """Width of the MLP."""
    seq: int = 2048
    vocab: int = 32000
    tied: bool = False
    """Whether the head shares the token embedding's weight."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} does not divide into heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} does not divide into kv_heads={self.kv_heads}")
        if self.head_width % 2:
            raise ValueError(f"hidden={self.hidden} over heads={self.heads} is odd: rotary positions need pairs")

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.head_width = options.head_width
        narrow = options.kv_heads * options.head_width
        self.query = linear(options.hidden, options.hidden)
        self.key = linear(options.hidden, narrow)
        self.value = linear(options.hidden, narrow)
        self.output = linear(options.hidden, options.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (split_heads(project(x), self.head_width) for project in (self.query, self.key, self.value))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(joined_heads(mixed))


class MLP(nn.Module):
    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.gate = linear(options.hidden, options.intermediate)
        self.expand = linear(options.hidden, options.intermediate)
        self.contract = linear(options.intermediate, options.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.silu(self.gate(x)) * self.expand(x))


class Block(nn.Module):
    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.hidden, eps=NORM_EPSILON)
        self.attention = Attention(options)
        self.mlp_norm = nn.RMSNorm(options.hidden, eps=NORM_EPSILON)
        self.mlp = MLP(options)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.options = options
        self.token_embedding = nn.Embedding(options.vocab, options.hidden)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.hidden, eps=NORM_EPSILON)
        self.head = linear(options.hidden, options.vocab)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if options.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        angles = rotary_angles(input_ids.shape[1], self.options.head_width, input_ids.device)
        x = self.token_embedding(input_ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotary_angles(seq: int, width: int, device: torch.device) -> Tensor:
    """[seq, width / 2]: position · base^(-2 i / width), in fp32 whatever the model computes in."""
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    return torch.outer(torch.arange(seq, device=device, dtype=torch.float32), ROTARY_BASE ** (-steps / width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + width/2}) by its angle."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
