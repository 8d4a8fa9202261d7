"""Blocks of recent papers: scans, retention, attention in other forms, flows, graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, HEADS, VOCAB, SEQ = 16, 32, 4, 24, 8


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _text(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    text = torch.randint(VOCAB, (8, SEQ + 1), generator=_random())
    return Net(kind), {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SelectiveScan(nn.Module):
    """A state-space layer whose steps depend on the input, as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv = nn.Conv1d(INNER, INNER, 4, groups=INNER, padding=3)
        self.select, self.step = nn.Linear(INNER, 10, bias=False), nn.Linear(2, INNER)
        self.decay = nn.Parameter(torch.arange(1, 5).float().log().repeat(INNER, 1))
        self.skip, self.out = nn.Parameter(torch.ones(INNER)), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        length = u.shape[1]
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        step, write, read = self.select(u).split([2, 4, 4], -1)
        step = F.softplus(self.step(step)).unsqueeze(-1)
        kept, added = (step * -self.decay.exp()).exp(), step * write.unsqueeze(2) * u.unsqueeze(-1)
        state, steps = torch.zeros_like(kept[:, 0]), []
        for t in range(length):
            state = kept[:, t] * state + added[:, t]
            steps.append((state * read[:, t, None]).sum(-1))
        return x + self.out((torch.stack(steps, 1) + u * self.skip) * F.silu(gate))


class Retention(nn.Module):
    """Attention without a softmax, that fades with distance, at another pace for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(HEADS, WIDTH)
        self.register_buffer("pace", 1 - 2.0 ** (-3 - torch.arange(HEADS).float()))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = (part(x).view(samples, length, HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        place = torch.arange(length, device=x.device)
        apart = place[:, None] - place
        faded = torch.where(apart >= 0, self.pace[:, None, None] ** apart.clamp(min=0), 0.0)
        mixed = ((q @ k.mT) * faded / 2) @ v
        mixed = self.norm(mixed.transpose(1, 2).reshape(samples * length, WIDTH)).view_as(x)
        return x + self.out(F.silu(self.gate(x)) * mixed)


class DifferentialAttention(nn.Module):
    """One map of attention less another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.share = nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k = (part(x).view(samples, length, HEADS, 2, 4).permute(0, 3, 2, 1, 4) for part in (self.q, self.k))
        v = self.v(x).view(samples, length, HEADS, 4).transpose(1, 2)
        maps = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        mixed = (maps[:, 0] - self.share * maps[:, 1]) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(samples, length, WIDTH))


class EinsumOfThree(nn.Module):
    """Weights by head, a diagonal, and three operands in one equation."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(HEADS, WIDTH, 4) / 4) for _ in range(3))
        self.out = nn.Parameter(torch.randn(HEADS, 4, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("b s d, h d e -> b h s e", x, w) for w in (self.q, self.k, self.v))
        maps = torch.einsum("bhqe,bhke->bhqk", q, k).div(2).softmax(-1)
        own = torch.einsum("bhii->bhi", maps).mean(1).unsqueeze(-1)
        return x + torch.einsum("bhqk,bhke,hed->bqd", maps, v, self.out) + own


class Splines(nn.Module):
    """A learned function on every edge."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 6))
        self.curves = nn.Parameter(torch.randn(WIDTH, WIDTH, 6) * 0.1)
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))
        return x + torch.einsum("bsig,oig->bso", near, self.curves) + F.linear(F.silu(x), self.base)


class Coupling(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned, self.net = turned, nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = reversed(x.chunk(2, -1)) if self.turned else x.chunk(2, -1)
        scale, shift = self.net(kept).chunk(2, -1)
        scale = torch.tanh(scale)
        changed = changed * scale.exp() + shift
        return torch.cat([changed, kept] if self.turned else [kept, changed], -1), volume + scale.sum(-1)


class Flow(nn.Module):
    """A normalising flow: a matrix, then couplings, and the logarithm of the volume they change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Coupling(number % 2 == 1) for number in range(4)])
        self.turn = nn.Parameter(torch.randn(8, 8) * 0.3 + torch.eye(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, volume = x @ self.turn, x.new_zeros(x.shape[0]) + torch.linalg.slogdet(self.turn)[1]
        for layer in self.layers:
            x, volume = layer(x, volume)
        return x, volume


def _likelihood(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (0.5 * output[0].pow(2).sum(-1) - output[1]).mean()


class GraphAttention(nn.Module):
    """Attention along edges, normalised at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(16, 16, bias=False), nn.Parameter(torch.randn(2, 4, 4) * 0.3)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        samples, nodes, _ = x.shape
        h, row = self.project(x).view(samples, nodes, 4, 4), torch.arange(samples, device=x.device)[:, None]
        sent, met = h[row, source], h[row, target]
        weight = F.leaky_relu((sent * self.score[0] + met * self.score[1]).sum(-1), 0.2).exp()
        index = target[..., None].expand_as(weight)
        total = torch.zeros(samples, nodes, 4, dtype=x.dtype, device=x.device).scatter_add_(1, index, weight)
        share = (weight / (total.gather(1, index) + 1e-9)).unsqueeze(-1)
        mixed = torch.zeros_like(h).index_put((row.expand_as(target), target), sent * share, accumulate=True)
        return x + F.elu(mixed.flatten(2))


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 16), nn.Linear(16, 2)
        self.layers = nn.ModuleList([GraphAttention() for _ in range(4)])

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x.amax(1))


def selective_scan():
    return _text(SelectiveScan)


def retention():
    return _text(Retention)


def differential_attention():
    return _text(DifferentialAttention)


def einsum_of_three():
    return _text(EinsumOfThree)


def splines():
    return _text(Splines)


def normalising_flow():
    return Flow(), {"x": torch.randn(8, 8, generator=_random())}, _likelihood


def graph_attention():
    r = _random()
    edges = {name: torch.randint(6, (8, 12), generator=r) for name in ("source", "target")}
    return GraphNet(), {"x": torch.randn(8, 6, 5, generator=r), **edges, "labels": torch.randint(2, (8,), generator=r)}
