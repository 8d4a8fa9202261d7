"""Llamas as people write them: complex rotary embeddings, layers in a ModuleDict, parts that are called one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, SEQ, VOCAB, DEPTH, INNER = 32, 4, 2, 16, 48, 4, 64
HEAD = WIDTH // HEADS


def text_batch(samples: int = 8) -> dict[str, Tensor]:
    text = torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def frequencies(length: int) -> Tensor:
    inverse = 1.0 / (10000 ** (torch.arange(0, HEAD, 2).float() / HEAD))
    angles = torch.outer(torch.arange(length).float(), inverse)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    shape = [size if at in (1, pairs.ndim - 1) else 1 for at, size in enumerate(pairs.shape)]
    return torch.view_as_real(pairs * freqs.view(*shape)).flatten(3).type_as(x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = rotated(self.wq(x).view(batch, seq, -1, HEAD), freqs)
        k = rotated(self.wk(x).view(batch, seq, -1, HEAD), freqs)
        v = self.wv(x).view(batch, seq, -1, HEAD)
        k, v = (torch.repeat_interleave(part, HEADS // KV_HEADS, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = Norm(), Norm()

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Meta's own form: frequencies are a plain tensor, not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm, self.output = Norm(), nn.Linear(WIDTH, VOCAB, bias=False)
        self.freqs_cis = frequencies(2 * SEQ)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        freqs = self.freqs_cis.to(h.device)[: tokens.shape[1]]
        for layer in self.layers:
            h = layer(h, freqs)
        return self.output(self.norm(h)).float()


class TitanLlama(nn.Module):
    """Layers in a ModuleDict by number; frequencies in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("freqs_cis", frequencies(2 * SEQ), persistent=False)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(DEPTH)})
        self.norm, self.output = Norm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis[: tokens.shape[1]])
        h = self.norm(h) if self.norm else h
        return self.output(h) if self.output else h


class PartsLlama(Llama):
    """The model calls the parts of its layers itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        freqs = self.freqs_cis[: tokens.shape[1]]
        for layer in self.layers:
            h = h + layer.attention(layer.attention_norm(h), freqs)
            h = h + layer.feed_forward(layer.ffn_norm(h))
        return self.output(self.norm(h))


class HalfRotary(nn.Module):
    """Cosines and sines cut from a buffer, halves put together again."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(SEQ).float(), 1.0 / (10000 ** (torch.arange(0, HEAD, 2).float() / HEAD)))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[: x.shape[-2]] + turned * self.sin[: x.shape[-2]]


class FusedBlock(nn.Module):
    """One weight for q, k, v and one for gate and up, read by slices; grouped heads by expand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * KV_HEADS * HEAD, bias=False)
        self.out, self.gate_up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down, self.rotary = nn.Linear(INNER, WIDTH, bias=False), HalfRotary()

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(self.norm1(x))
        q = qkv[..., :WIDTH].view(b, t, HEADS, HEAD).transpose(1, 2)
        k = qkv[..., WIDTH : WIDTH + KV_HEADS * HEAD].view(b, t, KV_HEADS, HEAD).transpose(1, 2)
        v = qkv[..., WIDTH + KV_HEADS * HEAD :].view(b, t, KV_HEADS, HEAD).transpose(1, 2)
        q, k = self.rotary(q), self.rotary(k)
        k, v = (
            p[:, :, None].expand(b, KV_HEADS, HEADS // KV_HEADS, t, HEAD).reshape(b, HEADS, t, HEAD) for p in (k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.out(y)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class FusedLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.Sequential(*[FusedBlock() for _ in range(DEPTH)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def complex_rotary_llama():
    return Llama(), text_batch()


def titan_llama():
    return TitanLlama(), text_batch()


def llama_part_by_part():
    return PartsLlama(), text_batch()


def fused_llama():
    return FusedLlama(), text_batch()
