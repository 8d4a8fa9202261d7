"""torch's own attention, encoders and decoders, and attention by einsum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SEQ, VOCAB, DEPTH = 32, 4, 16, 48, 4


def text_batch(samples: int = 8) -> dict[str, Tensor]:
    text = torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        mask = torch.triu(
            torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device, dtype=x.dtype), diagonal=1
        )
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Embeddings, blocks, a head."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Parameter(0.02 * torch.randn(1, SEQ, WIDTH))
        self.blocks, self.norm, self.head = blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[:, : tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=DEPTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class TorchTransformer(nn.Module):
    """nn.Transformer: encoder and decoder, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.0)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, shifted: Tensor) -> Tensor:
        source, target = self.embed(tokens).transpose(0, 1), self.embed(shifted).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[0], device=source.device, dtype=source.dtype)
        return self.head(self.transformer(source, target, tgt_mask=mask).transpose(0, 1))


class EinsumBlock(nn.Module):
    """Weights with a dim of heads; products by einsum in many forms."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Parameter(0.1 * torch.randn(3, WIDTH, HEADS, width))
        self.out = nn.Parameter(0.1 * torch.randn(HEADS, width, WIDTH))
        self.up, self.down = nn.Parameter(0.1 * torch.randn(WIDTH, 64)), nn.Parameter(0.1 * torch.randn(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btd,ndhe->nbthe", self.norm(x), self.qkv)
        scores = torch.einsum("bthe,bshe->bhts", q, k) / q.shape[-1] ** 0.5
        weights = scores.softmax(-1)
        y = torch.einsum("bhts,bshe->bthe", weights, v)
        x = x + torch.einsum("bthe,hed->btd", y, self.out)
        return x + torch.einsum("...f,fd->...d", F.relu(torch.einsum("...d,df->...f", x, self.up)), self.down)


class GluBlock(nn.Module):
    """F.glu of one projection, as in Conformer and gated convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.glu(self.up(self.norm(x)), dim=-1))


class MixerBlock(nn.Module):
    """An MLP over tokens, and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(SEQ, 32), nn.GELU(), nn.Linear(32, SEQ))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Albert(nn.Module):
    """One block, called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCAB, WIDTH), AttentionBlock(), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(DEPTH):
            x = self.block(x)
        return self.head(x)


class SharedMlp(nn.Module):
    """Blocks of their own attention with one MLP for all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([AttentionBlock() for _ in range(DEPTH)])
        for block in self.blocks[1:]:
            block.mlp = self.blocks[0].mlp

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class EarlyExit(nn.Module):
    """How many blocks run depends on what goes through them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([AttentionBlock() for _ in range(DEPTH)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if x.abs().mean() > 100.0:
                break
            x = block(x)
        return self.head(x)


def _blocks(kind: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*[kind() for _ in range(DEPTH)])


def multihead_attention():
    return Stack(_blocks(AttentionBlock)), text_batch()


def torch_encoder():
    return TorchEncoder(), text_batch()


def torch_transformer():
    batch = text_batch()
    return TorchTransformer(), {**batch, "shifted": batch["tokens"].roll(1, 1)}


def einsum_blocks():
    return Stack(_blocks(EinsumBlock)), text_batch()


def glu_blocks():
    return Stack(_blocks(GluBlock)), text_batch()


def mlp_mixer():
    return Stack(_blocks(MixerBlock)), text_batch()


def albert_by_hand():
    return Albert(), text_batch()


def shared_mlp():
    return SharedMlp(), text_batch()


def conditional_depth():
    return EarlyExit(), text_batch()
