"""Models that bring their own gradient checkpointing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

WIDTH, HEADS, SEQ, VOCAB, DEPTH = 32, 4, 16, 48, 4


def text_batch(name: str = "tokens", samples: int = 8) -> dict[str, Tensor]:
    text = torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {name: text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (layer(h).view(b, t, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedInside(Block):
    """Only the MLP is redone."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.v(self.norm1(x)))
        return x + checkpoint(self._mlp, x, use_reentrant=False)

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm2(x))))


class Inside(Checkpointed):
    def __init__(self) -> None:
        super().__init__(reentrant=False)
        self.blocks = nn.ModuleList([CheckpointedInside() for _ in range(DEPTH)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Segments(Checkpointed):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.blocks, 2, self.embed(tokens), use_reentrant=False))


def checkpoint_reentrant():
    return Checkpointed(True), text_batch()


def checkpoint_not_reentrant():
    return Checkpointed(False), text_batch()


def checkpoint_inside_blocks():
    return Inside(), text_batch()


def checkpoint_by_segments():
    return Segments(False), text_batch()


SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}


def llama_gradient_checkpointing():
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=SEQ, use_cache=False)
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    return model, text_batch("input_ids")


def llama_reentrant_checkpointing():
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=SEQ, use_cache=False)
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model, text_batch("input_ids")


def bert_gradient_checkpointing():
    model = BertForSequenceClassification(
        BertConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=SEQ, num_labels=3)
    )
    model.gradient_checkpointing_enable()
    labels = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": text_batch()["tokens"], "labels": labels}


def vit_gradient_checkpointing():
    model = ViTForImageClassification(ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=3))
    model.gradient_checkpointing_enable()
    random = torch.Generator().manual_seed(1)
    pixels, labels = torch.randn(8, 3, 16, 16, generator=random), torch.randint(3, (8,), generator=random)
    return model, {"pixel_values": pixels, "labels": labels}
