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
        self.tensors = dict(received)
        self._like = [received[number] for number in self.trained]
        self._back = _Back()
        if self.trained:
            anchor = torch.empty(0, requires_grad=True)
            made = _Arrive.apply(anchor, self._back, self._like)  # type: ignore[no-untyped-call]
            for number, tensor in zip(self.trained, made, strict=True):
                self.tensors[number] = lay(tensor, layout_of(received[number]))

    def gradients(self) -> dict[int, Tensor]:
        """Of every tensor that needs one; zero where nothing used it."""
        found = self._back.gradients or [None] * len(self.trained)
        rows = zip(self.trained, found, self._like, strict=True)
        return {number: torch.zeros_like(like) if gradient is None else gradient for number, gradient, like in rows}


class _Back:
    """Where gradients end up. It knows no tensor of the graph: a circle through autograd's nodes would not be freed."""

    def __init__(self) -> None:
        self.gradients: list[Tensor | None] = []


class _Arrive(torch.autograd.Function):
    """Makes no copy, and unlike a leaf its results may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, back: _Back, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.back = back
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)  # new tensors on the same memory, views of nothing

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.back.gradients = list(gradients)
        return None, None, None
