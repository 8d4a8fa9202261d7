"""Recurrent nets, recommenders, graphs, contrast, physics."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(48, 16), nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class GruStack(nn.Module):
    """One recurrent layer a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.layers = nn.ModuleList([nn.GRU(16, 16, batch_first=True) for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


class CellByHand(nn.Module):
    """A recurrence written as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(48, 16), nn.LSTMCell(16, 16), nn.Linear(16, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h = c = x.new_zeros(x.shape[0], 16)
        steps = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            steps.append(h)
        return self.head(torch.stack(steps, 1))


class Dlrm(nn.Module):
    """Tables of sparse features, products of pairs, two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(sparse[:, at]) for at, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        left, right = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([x, products[:, left, right]], dim=1))


class GraphLayer(nn.Module):
    """Messages along edges, added at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(32, 32), nn.Linear(48, 16)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        index = source.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        ends = target.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        both = torch.cat([torch.gather(x, 1, index), torch.gather(x, 1, ends)], dim=-1)
        messages = F.relu(self.message(both))
        wide = target.unsqueeze(-1).expand(-1, -1, messages.shape[-1])
        total = torch.zeros(*x.shape[:2], 32, dtype=x.dtype, device=x.device).scatter_add(1, wide, messages)
        return x + self.update(torch.cat([x, total], dim=-1))


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList([GraphLayer() for _ in range(4)])

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x.mean(1))


class Routed(nn.Module):
    """Tokens go to experts by index, and come back by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return x + out.view_as(x)


class RoutedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.layers = nn.ModuleList([Routed() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clip(nn.Module):
    """Two towers; the contrast sees the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 16))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        left, right = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.temperature.exp() * left @ right.t()


def _contrast(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    places = torch.arange(scores.shape[0], device=scores.device)
    return (F.cross_entropy(scores, places) + F.cross_entropy(scores.t(), places)) / 2


class Physics(nn.Module):
    """u'' + u = 0: the output is made of derivatives of the network by its input."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [2, 32, 32, 32, 1]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, points: Tensor) -> Tensor:
        points = points.requires_grad_(True)
        u = self.layers(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return second[:, :1] + u


class DeepSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ChannelShuffleMlp(nn.Module):
    """Channels mixed across groups between two linears, over residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.up(x))
        y = y.view(*y.shape[:-1], 4, 8).transpose(-1, -2).reshape(y.shape)
        return x + self.down(y)


class LongConvolution(nn.Module):
    """A convolution over the whole sequence by Fourier transform, as in Hyena and S4."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.kernel = nn.Parameter(0.1 * torch.randn(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y = self.up(x).transpose(1, 2)
        spectrum = torch.fft.rfft(y, n=2 * length) * torch.fft.rfft(self.kernel[:, :length], n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return x + self.down(F.gelu(y).transpose(1, 2))


class Texts(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.layers = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _texts() -> dict[str, Tensor]:
    text = torch.randint(48, (8, 17), generator=_random())
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def lstm():
    return Lstm(), _texts()


def gru_stack():
    return GruStack(), _texts()


def lstm_by_hand():
    return CellByHand(), _texts()


def dlrm():
    r = _random()
    sparse = torch.randint(20, (8, 3, 4), generator=r)
    return Dlrm(), {
        "dense": torch.randn(8, 6, generator=r),
        "sparse": sparse,
        "labels": torch.randint(2, (8,), generator=r),
    }


def graph_scatter():
    r = _random()
    edges = {name: torch.randint(10, (8, 24), generator=r) for name in ("source", "target")}
    return GraphNet(), {"x": torch.randn(8, 10, 6, generator=r), **edges, "labels": torch.randint(3, (8,), generator=r)}


def index_add_experts():
    return RoutedNet(), _texts()


def contrast():
    r = _random()
    return Clip(), {"image": torch.randn(8, 12, generator=r), "text": torch.randn(8, 10, generator=r)}, _contrast


def physics_informed():
    r = _random()
    return Physics(), {"points": torch.randn(8, 2, generator=r), "labels": torch.zeros(8, 1)}


def sequential_mlp():
    r = _random()
    return DeepSequential(), {"x": torch.randn(8, 12, generator=r), "labels": torch.randint(5, (8,), generator=r)}


def channel_shuffle():
    return Texts(ChannelShuffleMlp), _texts()


def fourier_convolution():
    return Texts(LongConvolution), _texts()
