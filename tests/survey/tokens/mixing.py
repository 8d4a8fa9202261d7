"""Blocks that mix tokens or channels in ways other than plain attention: each reads places, neighbours, sums or heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SEQ, VOCAB, DEPTH, INNER = 32, 4, 16, 24, 4, 64
HEAD = WIDTH // HEADS


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _of(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    text = torch.randint(VOCAB, (8, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return Net(kind), {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


class Attention(nn.Module):
    """With a place for what others change of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, HEAD).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.attend(*(self.heads(layer(h)) for layer in (self.q, self.k, self.v)))
        return x + self.o(y.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Alibi(Attention):
    """Slopes by head and distances by place are made in the block."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        places = torch.arange(length, device=q.device)
        slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=q.device, dtype=q.dtype)
        bias = slopes[:, None, None] * (places[None, :] - places[:, None]).to(q.dtype)
        causal = places[None, :] > places[:, None]
        scores = q @ k.transpose(-1, -2) / HEAD**0.5 + bias
        return scores.masked_fill(causal, float("-inf")).softmax(-1) @ v


class RelativeBias(Attention):
    """A table of biases by distance and head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * SEQ - 1, HEADS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        bias = self.table(places[None] - places[:, None] + SEQ - 1).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


class TrilMask(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(q.shape[2], k.shape[2], device=q.device, dtype=torch.bool))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class LinearAttention(Attention):
    """Causal, by running sums over tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhti,bhtj->bhtij", k, v).cumsum(2)
        total = k.cumsum(2)
        return torch.einsum("bhti,bhtij->bhtj", q, state) / (torch.einsum("bhti,bhti->bht", q, total)[..., None] + 1e-6)


class TalkingHeads(Attention):
    """Scores are mixed across heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1 * torch.randn(HEADS, HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhts,hg->bgts", q @ k.transpose(-1, -2) / HEAD**0.5, self.mix)
        return scores.softmax(-1) @ v


class HeadScale(Attention):
    """A parameter for each head, and norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((HEADS, 1, 1), 2.0))
        self.norm_q, self.norm_k = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.norm_q(q) @ self.norm_k(k).transpose(-1, -2) * self.scale
        return scores.softmax(-1) @ v


class WindowAttention(Attention):
    """Tokens in windows of four."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, t, e = q.shape
        q, k, v = (part.reshape(b, h, t // 4, 4, e) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(b, h, t, e)


class Latents(Attention):
    """Learned queries read the tokens, and the tokens read them again (Perceiver, Set Transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        latents = self.heads(self.q(self.latents)).expand(x.shape[0], -1, -1, -1)
        read = F.scaled_dot_product_attention(latents, self.heads(self.k(h)), self.heads(self.v(h)))
        y = F.scaled_dot_product_attention(self.heads(self.q(h)), read, read)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class TokenShift(Mlp):
    """RWKV's: each token is mixed with the one before."""

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        return super().forward(0.5 * x + 0.5 * before)


class Rolled(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x + 0.5 * torch.roll(x, shifts=1, dims=1))


class Flipped(Mlp):
    """Both directions, as bidirectional recurrences have it."""

    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x.cumsum(1) / 16) + torch.tanh(x.flip(1).cumsum(1).flip(1) / 16)


class ConvolutionOverTokens(Mlp):
    """Causal and depthwise, as in Mamba and Conformer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(INNER, INNER, 4, padding=3, groups=INNER)

    def act(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class GlobalPool(Mlp):
    """A gate from the mean and the spread over all tokens."""

    def act(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x.mean(1, keepdim=True) + x.std(1, keepdim=True))
        return F.gelu(x) * gate + x.amax(1, keepdim=True)


class ChosenTokens(Mlp):
    """Mixture of depths: only the tokens with the largest scores go through."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        weights, places = scores.topk(4, dim=1)
        index = places.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        chosen = torch.gather(x, 1, index)
        made = (super().forward(chosen) - chosen) * torch.sigmoid(weights).unsqueeze(-1)
        return x.scatter_add(1, index, made)


class Groups(Mlp):
    """Group norm over channels, then a maximum over pairs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.groups, self.down = nn.GroupNorm(4, INNER), nn.Linear(INNER // 2, WIDTH)

    def act(self, x: Tensor) -> Tensor:
        y = self.groups(x.transpose(1, 2)).transpose(1, 2)
        return y.unflatten(-1, (INNER // 2, 2)).amax(-1)


class Interleaved(Mlp):
    """Even channels gate odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(INNER // 2, WIDTH)

    def act(self, x: Tensor) -> Tensor:
        return F.silu(x[..., ::2]) * x[..., 1::2]


class Outer(Mlp):
    """Products of all pairs of a few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.down = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down((self.left(h).unsqueeze(-1) * self.right(h).unsqueeze(-2)).flatten(-2))


class SoftmaxOverChannels(Mlp):
    """A memory of keys: the inner activation is a softmax over what tp splits."""

    def act(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class LowRank(Mlp):
    """LoRA: a frozen weight beside two small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h) + 2.0 * self.b(self.a(h))))


class Hyper(Mlp):
    """Weights are made of the token mean by another network."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + 0.1 * torch.tanh(self.make(x.mean(1)))
        return x + self.down(F.gelu(torch.addcmul(self.up(self.norm(x)), scale[:, None], self.up.bias)))


class InPlace(Mlp):
    def act(self, x: Tensor) -> Tensor:
        y = x * 2
        y[..., 0].zero_()
        y.clamp_(min=-1).add_(0.1)
        return y.mul_(torch.sigmoid(y.clone()))


def alibi_in_block():
    return _of(Alibi)


def relative_bias_table():
    return _of(RelativeBias)


def tril_mask():
    return _of(TrilMask)


def linear_attention():
    return _of(LinearAttention)


def talking_heads():
    return _of(TalkingHeads)


def head_scale():
    return _of(HeadScale)


def window_attention():
    return _of(WindowAttention)


def latent_queries():
    return _of(Latents)


def token_shift():
    return _of(TokenShift)


def rolled_tokens():
    return _of(Rolled)


def both_directions():
    return _of(Flipped)


def convolution_over_tokens():
    return _of(ConvolutionOverTokens)


def gate_of_all_tokens():
    return _of(GlobalPool)


def mixture_of_depths():
    return _of(ChosenTokens)


def group_norm_max():
    return _of(Groups)


def interleaved_gate():
    return _of(Interleaved)


def outer_product():
    return _of(Outer)


def softmax_over_channels():
    return _of(SoftmaxOverChannels)


def low_rank_adapters():
    return _of(LowRank)


def weights_from_tokens():
    return _of(Hyper)


def in_place_activation():
    return _of(InPlace)
