"""Decoders as people write them for themselves."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SEQ, VOCAB, DEPTH = 32, 4, 16, 48, 4


def tokens(samples: int = 8) -> Tensor:
    return torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(0))


class MinAttention(nn.Module):
    """A registered mask, single products, dropouts as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(SEQ, SEQ)).view(1, 1, SEQ, SEQ))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MinBlock(nn.Module):
    """The MLP is a dict of modules, called by a lambda."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = MinAttention()
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(WIDTH, 4 * WIDTH),
                "c_proj": nn.Linear(4 * WIDTH, WIDTH),
                "act": nn.GELU(),
                "dropout": nn.Dropout(0.1),
            }
        )
        m = self.mlp
        self.mlpf = lambda x: m["dropout"](m["c_proj"](m["act"](m["c_fc"](x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class MinGPT(nn.Module):
    """Positions are made on the device of the tokens in forward; the loss is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(SEQ, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([MinBlock() for _ in range(DEPTH)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        device = idx.device
        t = idx.size(1)
        pos = torch.arange(0, t, dtype=torch.long, device=device).unsqueeze(0)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def _own_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return output[1]


def mingpt():
    text = tokens()
    return MinGPT(), {"idx": text[:, :-1], "labels": text[:, 1:].contiguous()}


def mingpt_own_loss():
    text = tokens()
    return MinGPT(), {"idx": text[:, :-1], "targets": text[:, 1:].contiguous()}, _own_loss


class NanoNorm(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = NanoNorm(False), NanoNorm(False)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in (q, k, v))
        rate = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=rate, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), self.dropout, self.training)


class NanoGPT(nn.Module):
    """Tied embeddings, dropout in functional calls, the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(SEQ, WIDTH),
                "h": nn.ModuleList([NanoBlock() for _ in range(DEPTH)]),
                "ln_f": NanoNorm(False),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nanogpt():
    text = tokens()
    return NanoGPT(), {"idx": text[:, :-1], "labels": text[:, 1:].contiguous()}


def nanogpt_own_loss():
    text = tokens()
    return NanoGPT(), {"idx": text[:, :-1], "targets": text[:, 1:].contiguous()}, _own_loss
