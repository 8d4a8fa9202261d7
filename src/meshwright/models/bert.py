"""An encoder-only transformer in the manner of BERT: sees both sides, post-norm blocks, fills in masked tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-12


@dataclass(frozen=True)
class TransformerOptions:
    """A transformer whose heads share out its width."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    mlp: int = 4
    """Width of the MLP in multiples of hidden."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} does not divide into heads={self.heads}")


@dataclass(frozen=True)
class BERTOptions(TransformerOptions):
    seq: int = 512
    vocab: int = 30522
    kinds: int = 2
    """Kinds of segments a token may belong to."""
    tied: bool = True
    """Whether the head shares the token embedding's weight."""


class Embedding(nn.Module):
    """Token, position and kind of segment, added and normalised."""

    def __init__(self, options: BERTOptions) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocab, options.hidden)
        self.position = nn.Embedding(options.seq, options.hidden)
        self.kind = nn.Embedding(options.kinds, options.hidden)
        self.norm = nn.LayerNorm(options.hidden, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        kinds = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        return self.dropout(self.norm(self.token(input_ids) + self.position(positions) + self.kind(kinds)))


def split_heads(x: Tensor, head_width: int) -> Tensor:
    """[batch, tokens, width] → [batch, heads, tokens, head width]"""
    return x.unflatten(-1, (-1, head_width)).transpose(1, 2)


def joined_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, head width] → [batch, tokens, width]"""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Every position sees every other, or those that a mask leaves it. ViT has the same, GPT a causal one."""

    def __init__(self, options: TransformerOptions) -> None:
        super().__init__()
        self.head_width = options.hidden // options.heads
        self.dropout = options.dropout
        self.query = nn.Linear(options.hidden, options.hidden)
        self.key = nn.Linear(options.hidden, options.hidden)
        self.value = nn.Linear(options.hidden, options.hidden)
        self.output = nn.Linear(options.hidden, options.hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (split_heads(project(x), self.head_width) for project in (self.query, self.key, self.value))
        return self.output(joined_heads(self.mix(query, key, value, mask)))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


class MLP(nn.Module):
    def __init__(self, options: TransformerOptions) -> None:
        super().__init__()
        self.expand = nn.Linear(options.hidden, options.mlp * options.hidden)
        self.contract = nn.Linear(options.mlp * options.hidden, options.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(x)))


class Block(nn.Module):
    def __init__(self, options: BERTOptions) -> None:
        super().__init__()
        self.attention = Attention(options)
        self.attention_norm = nn.LayerNorm(options.hidden, eps=NORM_EPSILON)
        self.mlp = MLP(options)
        self.mlp_norm = nn.LayerNorm(options.hidden, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


class Head(nn.Module):
    """From a position's vector to a guess at its token."""

    def __init__(self, options: BERTOptions) -> None:
        super().__init__()
        self.transform = nn.Linear(options.hidden, options.hidden)
        self.norm = nn.LayerNorm(options.hidden, eps=NORM_EPSILON)
        self.output = nn.Linear(options.hidden, options.vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(F.gelu(self.transform(x))))


class BERT(nn.Module):
    def __init__(self, options: BERTOptions) -> None:
        super().__init__()
        self.embedding = Embedding(options)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.head = Head(options)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        if options.tied:
            self.head.output.weight = self.embedding.token.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """`attention_mask` [batch, seq]: 1 for a token, 0 for padding, which nobody looks at."""
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        x = self.embedding(input_ids, token_type_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)
