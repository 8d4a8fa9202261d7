"""Tensors from the stage before, and the way back for their gradients.

Both ends of a stage are roots and leaves of its own piece of the autograd graph: backward starts from what was sent, with the
gradients that came back for it, and ends where tensors arrived.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.split.layout import lay, layout_of


class Arrivals:
    """What one microbatch brought to one stage, by number."""

    def __init__(self, received: dict[int, Tensor], needs_gradient: frozenset[int]) -> None:
        self.trained = [number for number in received if number in needs_gradient and torch.is_grad_enabled()]
        self._like = {number: received[number] for number in self.trained}
        self._gradients: dict[int, Tensor] = {}
        self.tensors = dict(received)
        if self.trained:
            anchor = torch.empty(0, requires_grad=True)
            made = _Arrive.apply(anchor, self, [received[number] for number in self.trained])  # type: ignore[no-untyped-call]
            for number, tensor in zip(self.trained, made, strict=True):
                self.tensors[number] = lay(tensor, layout_of(received[number]))

    def arrived_back(self, gradients: tuple[Tensor | None, ...]) -> None:
        for number, gradient in zip(self.trained, gradients, strict=True):
            if gradient is not None:
                self._gradients[number] = gradient

    def gradients(self) -> dict[int, Tensor]:
        """Of every tensor that needs one; zero where nothing used it."""
        return {number: self._gradients.get(number, _zero(self._like[number])) for number in self.trained}


def _zero(like: Tensor) -> Tensor:
    return torch.zeros_like(like)


class _Arrive(torch.autograd.Function):
    """Makes no copy, and unlike a leaf its results may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrivals: Arrivals, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.arrivals = arrivals
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.arrivals.arrived_back(gradients)
        return None, None, None
