"""Models whose layers ask torch.distributed who they are, and models whose modules go by several names."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH = 32, 16


class Centred(nn.Module):
    """Takes away the mean over all samples, as a layer for replicas does."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.up, self.down, self.asks = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), asks

    def forward(self, x):
        y = self.down(F.relu(self.up(x)))
        mean = y.mean((0, 1)).detach()
        if not self.asks or (dist.is_initialized() and dist.get_world_size() > 1):
            mean = mean.clone()
            dist.all_reduce(mean)
            mean = mean / 3
        return x + y - mean


class Gated(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.sigmoid(self.shared(x)) * self.own(x)


class Masked(nn.Module):
    """Holds a mask of -inf, as causal attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, x):
        return x + (x @ x.transpose(1, 2) + self.mask).softmax(-1) @ self.mix(x)


class Net(nn.Module):
    def __init__(self, layers: list[nn.Module], first: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.first, self.layers = first or nn.Identity(), nn.ModuleList(layers)

    def forward(self, x):
        x = self.first(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _batch():
    tokens = torch.randint(VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(0))
    return {"x": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}


def asks_for_ranks():
    """depends_on_batch: the mean is that of a microbatch."""
    net = Net([Centred(asks=True) for _ in range(2)])
    net.depends_on_batch = True
    return net, _batch()


class Built(Centred):
    """Asks when it is built, and exchanges then without asking again."""

    def __init__(self) -> None:
        super().__init__(asks=True)
        self.spans_ranks = dist.is_initialized() and dist.get_world_size() > 1

    def forward(self, x):
        if self.spans_ranks:
            dist.all_reduce(torch.zeros(1))
        y = self.down(F.relu(self.up(x)))
        return x + (2 * y if self.spans_ranks else y)


def asks_when_built():
    return Net([Built() for _ in range(2)]), _batch()


def part_outside_of_blocks():
    """One projection is read by every layer, and before them."""
    shared = nn.Linear(WIDTH, WIDTH)
    return Net([Gated(shared) for _ in range(2)], first=Gated(shared)), _batch()


def layer_twice_in_a_list():
    last = Gated(nn.Linear(WIDTH, WIDTH))
    return Net([Gated(nn.Linear(WIDTH, WIDTH)), last, last]), _batch()


def mask_of_infinities():
    return Net([Masked() for _ in range(2)]), _batch()
