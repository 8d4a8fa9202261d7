"""A decoder-only transformer in the manner of GPT-2: learned positions, pre-norm blocks, tied or untied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models import bert
from meshwright.models.bert import MLP, TransformerOptions

ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class GPTOptions(TransformerOptions):
    seq: int = 1024
    vocab: int = 50304
    tied: bool = False
    """Whether the head shares the token embedding's weight."""
    attention: str = "sdpa"
    """sdpa: torch's fused attention. eager: scores, mask, softmax and dropout as ops of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention='{self.attention}' is not one of {', '.join(ATTENTIONS)}")


class Attention(bert.Attention):
    """A position sees those before it."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__(options)
        self.eager = options.attention == "eager"

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.eager:
            return self.mix_eagerly(query, key, value)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)

    def mix_eagerly(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same in single steps, as in an unfused attention core: the scores of all pairs are kept."""
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return F.dropout(weights, self.dropout, self.training) @ value


class Block(nn.Module):
    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(options.hidden)
        self.attention = Attention(options)
        self.mlp_norm = nn.LayerNorm(options.hidden)
        self.mlp = MLP(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def initialise_plainly(module: nn.Module) -> None:
    """Normal with deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Decoder(nn.Module):
    """Embeddings, blocks, norm and head of a decoder."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.options = options
        self.token_embedding = nn.Embedding(options.vocab, options.hidden)
        self.position_embedding = nn.Embedding(options.seq, options.hidden)
        self.blocks = nn.ModuleList(self.make_block(number) for number in range(options.layers))
        self.norm = nn.LayerNorm(options.hidden)
        self.head = nn.Linear(options.hidden, options.vocab, bias=False)
        self.apply(self.initialise)
        if options.tied:
            self.head.weight = self.token_embedding.weight

    def make_block(self, number: int) -> nn.Module:
        return Block(self.options)

    def initialise(self, module: nn.Module) -> None:
        """GPT-2's: normal with deviation 0.02, smaller on the way back into the residual stream, biases zero."""
        initialise_plainly(module)
        if isinstance(module, Block):
            for project in (module.attention.output, module.mlp.contract):
                nn.init.normal_(project.weight, std=0.02 / (2 * self.options.layers) ** 0.5)


class GPT(Decoder):
    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
