"""Differentiable moves between layouts: what goes one way in forward, and its gradient the other way in backward.

Two rules for the gradient of a whole tensor, by axis:

    tp   it is whole too: every rank has all of it                  (ranks that work on whole tensors do the same work)
    cp   it is a summand: the gradient is the sum over ranks        (parameters' gradients are added up over cp anyway)

    move       what it does                      forward           backward: tp         cp
    enter      whole, read by parts              -                 all-reduce           -
    total      summands → whole                  all-reduce        -                    all-reduce
    scatter    summands → parts                  reduce-scatter    all-gather           all-gather
    gather     parts → whole, read by all        all-gather        own part             reduce-scatter
    gather     parts → whole, read by parts      all-gather        reduce-scatter       reduce-scatter
    narrow     whole → parts                     own part          all-gather           padded with zeros
    swap       parts → parts along another dim   all-to-all        all-to-all           all-to-all
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Cut

Work = Callable[[Tensor], Tensor]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Work, back: Work) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0]), None, None


def _move(tensor: Tensor, there: Work, back: Work) -> Tensor:
    moved: Tensor = _Move.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return moved


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def sums_gradients(ranks: Ranks) -> bool:
    """Whether the gradient of a whole tensor is a summand along this axis."""
    return ranks.axis == "cp"


def enter(whole: Tensor, ranks: Ranks) -> Tensor:
    return whole if sums_gradients(ranks) else _move(whole, _same, ranks.add_up)


def total(addend: Tensor, ranks: Ranks) -> Tensor:
    return _move(addend, ranks.add_up, ranks.add_up if sums_gradients(ranks) else _same)


def scatter(addend: Tensor, ranks: Ranks, cut: Cut) -> Tensor:
    return _move(addend, lambda t: ranks.scatter(t, cut), lambda g: ranks.gather(g, cut))


def gather(part: Tensor, ranks: Ranks, cut: Cut, *, read_by_parts: bool = False) -> Tensor:
    def back(gradient: Tensor) -> Tensor:
        if read_by_parts or sums_gradients(ranks):
            return ranks.scatter(gradient, cut)
        return ranks.own_part(gradient, cut)

    return _move(part, lambda t: ranks.gather(t, cut), back)


def narrow(whole: Tensor, ranks: Ranks, cut: Cut) -> Tensor:
    back = ranks.padded if sums_gradients(ranks) else ranks.gather
    return _move(whole, lambda t: ranks.own_part(t, cut), lambda g: back(g, cut))


def swap(part: Tensor, ranks: Ranks, now: Cut, then: Cut) -> Tensor:
    return _move(part, lambda t: ranks.swap(t, now, then), lambda g: ranks.swap(g, then, now))
