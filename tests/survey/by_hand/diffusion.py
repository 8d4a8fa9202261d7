"""A diffusion transformer: adaptive norms by the time step, patches cut and put together by einsum."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DEPTH, SIZE, PATCH, CHANNELS = 32, 4, 4, 8, 2, 4


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Attention(nn.Module):
    """As timm writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh"), nn.Linear(64, WIDTH))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_a, scale_a))
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2, WIDTH))
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(DEPTH)])
        self.norm, self.out = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(8, device=t.device, dtype=t.dtype) / 8)[None]
        c = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.classes(y)
        x = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = self.out(modulate(self.norm(x), shift, scale))
        side = SIZE // PATCH
        x = x.reshape(x.shape[0], side, side, PATCH, PATCH, CHANNELS)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], CHANNELS, SIZE, SIZE)


def dit():
    random = torch.Generator().manual_seed(0)
    images = torch.randn(8, CHANNELS, SIZE, SIZE, generator=random)
    times, classes = torch.rand(8, generator=random), torch.randint(10, (8,), generator=random)
    return DiT(), {"x": images, "t": times, "y": classes, "labels": torch.randn(images.shape, generator=random)}
