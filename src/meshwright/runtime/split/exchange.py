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

Both ways of a move are linear, and each is the other's gradient: so a backward that is itself differentiated (a gradient
penalty, a physics-informed loss) is a move too, there and back exchanged.

A backward written by a user (a function, a hook) is to see the gradient that one process has, whole and at its own scale:

    for_own_backward     what such a function returns      -                 -                    all-reduce
    from_own_backward    what such a function is given     -                 -                    the first rank's counts
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
        ctx.there, ctx.back = there, back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _move(gradients[0], ctx.back, ctx.there), None, None


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


def counted_once(whole: Tensor, ranks: Ranks) -> Tensor:
    """For work that every rank does alike, on whole gradients: of those it gives, the first rank's counts."""
    if not sums_gradients(ranks):
        return whole
    return _move(whole, _same, _same if ranks.rank == 0 else torch.zeros_like)


def for_own_backward(whole: Tensor, ranks: Ranks) -> Tensor:
    """What a user's function returns: its backward sees the gradient that one process would have."""
    if not sums_gradients(ranks):
        return whole
    return _move(_scaled_gradient(whole, 1 / gradient_scale(ranks)), _same, ranks.add_up)


def from_own_backward(whole: Tensor, ranks: Ranks) -> Tensor:
    """What a user's function is given: the gradient that its backward makes becomes a summand again."""
    if not sums_gradients(ranks):
        return whole
    return _scaled_gradient(counted_once(whole, ranks), gradient_scale(ranks))


def gradient_scale(ranks: Ranks) -> float:
    """Every rank of cp begins its backward at a whole loss, and the reduction of parameters' gradients divides by their number."""
    return float(ranks.size) if sums_gradients(ranks) else 1.0


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return _same(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def _scaled_gradient(tensor: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _Scale.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled
