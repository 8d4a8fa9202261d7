"""An encoder and a decoder in the manner of T5: RMS norms, no biases, attention that knows positions only by distance.

Distances fall into buckets, exact for near ones and logarithmic up to MAX_DISTANCE; a table holds one number for each bucket
and head, which is added to the scores. The first block of a stack looks its distances up and hands them to the others:

    bias[h, q, k] = table[bucket(k - q), h]         weights = softmax(query · key + bias)         (scores are not scaled)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.bert import joined_heads, split_heads

NORM_EPSILON = 1e-6
NUM_BUCKETS = 32
MAX_DISTANCE = 128


@dataclass(frozen=True)
class T5Options:
    layers: int = 12
    """Blocks of the encoder, and of the decoder."""
    hidden: int = 768
    heads: int = 12
    head_width: int = 64
    intermediate: int = 3072
    """Width of the MLP."""
    seq: int = 512
    """Tokens the encoder reads; the decoder reads as many."""
    vocab: int = 32128
    dropout: float = 0.0
    gated: bool = False
    """The MLP of version 1.1: gelu(gate) · expand. Else relu."""
    tied: bool = True
    """Whether the head shares the token embedding's weight; version 1.1 does not."""


class RelativeBias(nn.Module):
    """What is added to the scores: [1, heads, seq, seq]. A causal one hides what comes later."""

    def __init__(self, options: T5Options, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(NUM_BUCKETS, options.heads)

    def forward(self, seq: int, device: torch.device) -> Tensor:
        positions = torch.arange(seq, device=device)
        offsets = positions[None, :] - positions[:, None]
        bias = self.table(bucket(offsets, self.causal)).permute(2, 0, 1)[None]
        return bias.masked_fill(offsets > 0, float("-inf")) if self.causal else bias


def bucket(offsets: Tensor, causal: bool) -> Tensor:
    """key position - query position → bucket. Seen from both sides, keys that come later have the upper half."""
    if causal:
        return distance_bucket(offsets.neg().clamp(min=0), NUM_BUCKETS)
    half = NUM_BUCKETS // 2
    return distance_bucket(offsets.abs(), half) + half * (offsets > 0)


def distance_bucket(distances: Tensor, num_buckets: int) -> Tensor:
    """Half of the buckets hold one distance each; the others grow like the logarithm, and the last has no end."""
    exact = num_buckets // 2
    growth = (num_buckets - exact) / math.log(MAX_DISTANCE / exact)
    far = exact + ((distances.clamp(min=1) / exact).log() * growth).long()
    return torch.where(distances < exact, distances, far.clamp(max=num_buckets - 1))


class Attention(nn.Module):
    """Queries of x look at keys and values of `seen`: x itself, or what the encoder made."""

    def __init__(self, options: T5Options) -> None:
        super().__init__()
        width = options.heads * options.head_width
        self.head_width = options.head_width
        self.dropout = options.dropout
        self.query = linear(options.hidden, width, std=(options.hidden * options.head_width) ** -0.5)
        self.key = linear(options.hidden, width, std=options.hidden**-0.5)
        self.value = linear(options.hidden, width, std=options.hidden**-0.5)
        self.output = linear(width, options.hidden, std=width**-0.5)

    def forward(self, x: Tensor, seen: Tensor, bias: Tensor | None = None) -> Tensor:
        query = split_heads(self.query(x), self.head_width)
        key, value = split_heads(self.key(seen), self.head_width), split_heads(self.value(seen), self.head_width)
        scores = query @ key.transpose(-2, -1)
        weights = (scores if bias is None else scores + bias).softmax(dim=-1)
        mixed = F.dropout(weights, self.dropout, self.training) @ value
        return self.output(joined_heads(mixed))


class MLP(nn.Module):
    def __init__(self, options: T5Options) -> None:
        super().__init__()
        self.dropout = nn.Dropout(options.dropout)
        self.gate = linear(options.hidden, options.intermediate, options.hidden**-0.5) if options.gated else None
        self.expand = linear(options.hidden, options.intermediate, options.hidden**-0.5)
        self.contract = linear(options.intermediate, options.hidden, options.intermediate**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        expanded = self.expand(x)
        inner = F.relu(expanded) if self.gate is None else F.gelu(self.gate(x), approximate="tanh") * expanded
        return self.contract(self.dropout(inner))


class EncoderBlock(nn.Module):
    def __init__(self, options: T5Options, *, first: bool) -> None:
        super().__init__()
        self.bias = RelativeBias(options, causal=False) if first else None
        self.attention_norm = norm(options)
        self.attention = Attention(options)
        self.mlp_norm = norm(options)
        self.mlp = MLP(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.bias is not None:
            bias = self.bias(x.shape[1], x.device)
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        return x + self.dropout(self.mlp(self.mlp_norm(x))), bias


class DecoderBlock(nn.Module):
    """Looks back at its own tokens, then at all of `memory`, where distances mean nothing."""

    def __init__(self, options: T5Options, *, first: bool) -> None:
        super().__init__()
        self.bias = RelativeBias(options, causal=True) if first else None
        self.attention_norm = norm(options)
        self.attention = Attention(options)
        self.memory_norm = norm(options)
        self.memory_attention = Attention(options)
        self.mlp_norm = norm(options)
        self.mlp = MLP(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.bias is not None:
            bias = self.bias(x.shape[1], x.device)
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        x = x + self.dropout(self.memory_attention(self.memory_norm(x), memory))
        return x + self.dropout(self.mlp(self.mlp_norm(x))), bias


class Encoder(nn.Module):
    def __init__(self, options: T5Options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(options, first=number == 0) for number in range(options.layers))
        self.norm = norm(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.dropout(x), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.dropout(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, options: T5Options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(options, first=number == 0) for number in range(options.layers))
        self.norm = norm(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x, bias = self.dropout(x), None
        for block in self.blocks:
            x, bias = block(x, memory, bias)
        return self.dropout(self.norm(x))


class T5(nn.Module):
    def __init__(self, options: T5Options) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(options.vocab, options.hidden)  # normal, deviation 1: torch's default
        self.encoder = Encoder(options)
        self.decoder = Decoder(options)
        self.head = linear(options.hidden, options.vocab, std=1.0)
        self.head_scale = options.hidden**-0.5 if options.tied else 1.0
        for module in self.modules():
            if isinstance(module, RelativeBias):
                nn.init.normal_(module.table.weight, std=options.hidden**-0.5)
        if options.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = self.encoder(self.token_embedding(input_ids))
        x = self.decoder(self.token_embedding(decoder_input_ids), memory)
        return self.head(x * self.head_scale)


def norm(options: T5Options) -> nn.RMSNorm:
    return nn.RMSNorm(options.hidden, eps=NORM_EPSILON)


def linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer
