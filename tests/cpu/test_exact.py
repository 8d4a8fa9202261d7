"""Inside `exact`, a model that casts to float32 computes in float64 all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.measure.exact import exact
from meshwright.runtime.recompute import _recomputed
from meshwright.runtime.watch import Watch

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(torch.float32),
    "to with a device": lambda x: x.to("cpu", torch.float16),
    "to by keyword": lambda x: x.to(dtype=torch.bfloat16),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "type": lambda x: x.type(torch.float32),
    "type by name": lambda x: x.type("torch.FloatTensor"),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "method": lambda x: x.sum(0, dtype=torch.float32),
    "made like it": lambda x: torch.zeros_like(x, dtype=torch.float32),
    "made from nothing": lambda x: torch.arange(3, dtype=torch.float32),
    "by default": lambda x: torch.ones(3),
    "from integers": lambda x: torch.arange(3).float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_narrow_dtype_is_widened(cast: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(3, 3, dtype=torch.float64)
    assert cast(x).dtype != torch.float64
    with exact():
        assert cast(x).dtype == torch.float64
    assert cast(x).dtype != torch.float64, "afterwards all is as before"


def test_other_dtypes_are_left_alone() -> None:
    with exact():
        x = torch.ones(2, dtype=torch.float64)
        assert x.to(torch.int64).dtype == torch.int64
        assert (x > 0).type(torch.uint8).dtype == torch.uint8
        assert x.to(torch.complex64).dtype == torch.complex128
        assert x.type() == "torch.DoubleTensor"
        assert torch.arange(3).dtype == torch.int64


class Casting(nn.Module):
    """Sums in float32, in as many parts as asked for; then a norm and a softmax as Hugging Face writes them."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(64, 64, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        halves = [
            part.sum(-1, keepdim=True) for part in self.linear(x).to(torch.float32).square().chunk(self.parts, -1)
        ]
        normed = (self.linear(x).float() * torch.rsqrt(torch.stack(halves).sum(0) + 1e-6)).to(x.dtype)
        return F.softmax(normed, dim=-1, dtype=torch.float32).type_as(x) * normed


def gradient(parts: int, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    module, x = Casting(parts), torch.randn(8, 64, dtype=torch.float64)
    run(module, x).square().sum().backward()
    assert module.linear.weight.grad is not None
    return module.linear.weight.grad


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    forward = _recomputed(module, "", Watch(None))
    return forward(x)  # type: ignore[no-any-return]


RUNS: list[Any] = [pytest.param(lambda module, x: module(x), id="kept"), pytest.param(recomputed, id="recomputed")]


@pytest.mark.parametrize("run", RUNS)
def test_the_order_of_sums_no_longer_shows(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    plain = (gradient(1, run) - gradient(4, run)).abs().max()
    with exact():
        whole, parted = gradient(1, run), gradient(4, run)
    assert (whole - parted).abs().max() < 1e-12 * whole.abs().max()
    assert plain > 1e-9 * whole.abs().max(), "without it the sums' order shows: else this test shows nothing"
