"""Inside `silence` nothing is drawn: what a model computes on a part of a batch is that part of what it computes on the whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Gumbel, Normal

from meshwright.measure.silence import silence, silence_modules

Function = Callable[[Tensor], Tensor]
WIDTH = 8


def heads(x: Tensor) -> Tensor:
    return x.view(len(x), 2, 2, WIDTH // 2)


def stochastic_depth(x: Tensor) -> Tensor:
    kept = 0.8 + torch.rand((len(x), *(1,) * (x.dim() - 1)), dtype=x.dtype)
    return x.div(0.8) * kept.floor_()


def masked_patches(x: Tensor) -> Tensor:
    """As masked autoencoders do."""
    order = torch.rand(x.shape[:2]).argsort(dim=1)
    return x.gather(1, order[..., None].expand_as(x))


DRAWS: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, True, True),
    "dropout by method": lambda x: torch.dropout(x, 0.3, train=True),
    "dropout of features": lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "dropout of images": lambda x: F.dropout2d(x[:, None], 0.5)[:, 0],
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=0.4),
    "attention by place": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), None, 0.4),
    "noise": lambda x: x + torch.randn_like(x),
    "uniform noise": lambda x: x + torch.rand(x.shape, dtype=x.dtype),
    "sizes in a row": lambda x: x + torch.randn(*x.shape),
    "in place": lambda x: x + torch.empty_like(x).normal_(0.5, 2.0),
    "uniform in place": lambda x: x + torch.empty_like(x).uniform_(-1, 3),
    "exponential": lambda x: x - x.new_empty(x.shape).exponential_().log(),
    "mask": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "mask in place": lambda x: x * x.new_empty(x.shape).bernoulli_(0.7),
    "mask of truth values": lambda x: x.masked_fill(torch.empty_like(x, dtype=torch.bool).bernoulli_(0.2), 0.0),
    "integers": lambda x: x + torch.randint(2, 9, x.shape),
    "integers below": lambda x: x + torch.randint(9, size=x.shape),
    "integers like": lambda x: x + torch.randint_like(x, 3, 9),
    "order": lambda x: x[:, :, torch.randperm(WIDTH)],
    "normal": lambda x: torch.normal(x, 1.0) + torch.normal(0.0, 1.0, x.shape),
    "choices": lambda x: torch.multinomial(x.exp()[:, 0], 2).to(x.dtype),
    "leaky": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x) + F.gumbel_softmax(x, hard=True),
    "reparametrised": lambda x: Normal(x, torch.ones_like(x)).rsample(),
    "categories": lambda x: Categorical(logits=x).sample().to(x.dtype),
    "distributions": lambda x: Bernoulli(x.sigmoid()).sample() + Gumbel(x, 1.0).rsample(),
    "stochastic depth": stochastic_depth,
    "masked patches": masked_patches,
    "layer drop": lambda x: x if random.random() < 0.2 or torch.rand([]) < 0.1 else 2 * x,
    "Python": lambda x: x * random.uniform(0, 3) + random.choice([1, 2, 3]),
    "NumPy": lambda x: x * torch.as_tensor(numpy.random.rand(*x.shape)) + numpy.random.normal(size=3)[0],
    "NumPy's choice": lambda x: x[:, :, numpy.random.choice(numpy.arange(WIDTH), 4, replace=False)],
}


def example() -> Tensor:
    return torch.randn(6, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_parts_of_a_batch_are_parts_of_the_whole(draw: Function) -> None:
    x, found = example(), set[str]()
    before = torch.get_rng_state()
    with silence(found):
        whole, parts = draw(x), torch.cat([draw(x[:2]), draw(x[2:])])
    assert torch.equal(whole, parts)
    assert found, "who would have drawn is said"
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn"


@pytest.mark.parametrize("draw", [draw for name, draw in DRAWS.items() if "choices" not in name])
def test_without_it_runs_differ(draw: Function) -> None:
    """Else the test above shows nothing."""
    runs = [draw(example()) for _ in range(16)]
    assert any(not torch.equal(runs[0], run) for run in runs[1:])


def test_what_draws_nothing_is_not_named() -> None:
    found, x = set[str](), example()
    with silence(found):
        F.dropout(x, 0.3, training=False)
        F.dropout(x, 0.0)
        F.scaled_dot_product_attention(heads(x), heads(x), heads(x))
        torch.zeros_like(x).fill_(1.0)
    assert not found
    assert random.random() != random.random(), "afterwards all is as before"


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True)
        self.rest = nn.Sequential(nn.AlphaDropout(0.2), nn.Dropout1d(0.2), nn.RReLU(), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        return self.rest(self.layer(self.attention(x, x, x)[0]))  # type: ignore[no-any-return]


def test_modules_that_draw_inside_a_kernel_are_told_not_to() -> None:
    module, x = Parts().double(), example()
    found = silence_modules(module)
    assert {"nn.LSTM", "nn.MultiheadAttention", "nn.Dropout", "nn.AlphaDropout", "nn.Dropout1d"} <= found
    with silence():
        whole, parts = module(x), torch.cat([module(x[:2]), module(x[2:])])
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-12)
