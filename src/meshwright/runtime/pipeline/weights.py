"""A backward in two halves: gradients of inputs at once, gradients of weights when the schedule says so.

    y = x W     backward for inputs:   ∂x = ∂y Wᵀ        at once
                backward for weights:  ∂W = xᵀ ∂y        put off, until `run`

A function mode replaces the functions that apply a weight (linear, matmul, addmm, convolutions), where the weight is a
parameter that is trained. All else, norms, biases, embeddings, takes little time and is done at once. It lies below every other
mode, so that it sees the functions as they are run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PutOff = Callable[[], None]


class WeightsLater(TorchFunctionMode):
    """While it is on, weights' gradients are put off. Whose backward runs is said by `owner` before it."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: Any = None
        self.queues: dict[Any, list[PutOff]] = {}

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        replaced = _REPLACED.get(function)
        if replaced is None or not torch.is_grad_enabled():
            return function(*arguments, **options)
        result = replaced(self, *arguments, **options)
        return function(*arguments, **options) if result is None else result

    def put_off(self, work: PutOff) -> None:
        """Outside of a backward in halves (owner None) it is done at once."""
        if self.owner is None:
            work()
        else:
            self.queues.setdefault(self.owner, []).append(work)

    def run(self, owner: Any) -> None:
        for work in self.queues.pop(owner, ()):
            work()


def _is_weight(tensor: Any, num_dims: int) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.dim() == num_dims


def add_gradient(weight: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(weight.dtype)
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


# ---------------------------------------------------------------- products: x W


class _Product(torch.autograd.Function):
    """x W, or x Wᵀ, plus a bias. The weight is no input of it for autograd, which would wait for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: _Held, transposed: bool, later: WeightsLater
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.transposed, ctx.later = weight, transposed, later
        ctx.has_bias = bias is not None
        if transposed:
            return F.linear(x, weight.tensor, bias)
        return x @ weight.tensor if bias is None else torch.addmm(bias, x, weight.tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        weight, transposed = ctx.weight.tensor, ctx.transposed
        with torch.no_grad():
            applied = weight.detach().to(gradient.dtype)
            of_input = (
                (gradient @ (applied if transposed else applied.T)).to(x.dtype) if ctx.needs_input_grad[0] else None
            )
            of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[1] else None

        def work() -> None:
            with torch.no_grad():
                rows, columns = gradient.flatten(0, -2), x.flatten(0, -2).to(gradient.dtype)
                add_gradient(weight, rows.T @ columns if transposed else columns.T @ rows)

        ctx.later.put_off(work)
        return of_input, of_bias, None, None, None


class _Held:
    """A weight out of autograd's sight."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _linear(later: WeightsLater, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not _is_weight(weight, 2) or not _can_wait(x, bias):
        return None
    return _Product.apply(x, bias, _Held(weight), True, later)  # type: ignore[no-any-return, no-untyped-call]


def _matmul(later: WeightsLater, x: Tensor, other: Tensor, **options: Any) -> Tensor | None:
    if options or not _is_weight(other, 2) or not _can_wait(x, None):
        return None
    return _Product.apply(x, None, _Held(other), False, later)  # type: ignore[no-any-return, no-untyped-call]


def _addmm(later: WeightsLater, bias: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Tensor | None:
    if options or not _is_weight(weight, 2) or not _can_wait(x, bias) or bias.dim() != 1:
        return None
    return _Product.apply(x, bias, _Held(weight), False, later)  # type: ignore[no-any-return, no-untyped-call]


def _can_wait(x: Tensor, bias: Tensor | None) -> bool:
    """A product whose only trained input is its weight has nothing to go first."""
    return x.requires_grad and x.dim() >= 2


# ---------------------------------------------------------------- convolutions


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: _Held, settings: tuple[Any, ...], later: WeightsLater
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.settings, ctx.later = weight, settings, later
        ctx.bias_shape = None if bias is None else list(bias.shape)
        return torch.ops.aten.convolution(x, weight.tensor, bias, *settings)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        weight, later, settings, shape = ctx.weight.tensor, ctx.later, ctx.settings, ctx.bias_shape
        narrow = x.to(gradient.dtype)

        def gradients(mask: list[bool]) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                applied = weight.detach().to(gradient.dtype)
                found = torch.ops.aten.convolution_backward(gradient, narrow, applied, shape, *settings, mask)
            return tuple(found)

        of_input, _, of_bias = gradients([bool(ctx.needs_input_grad[0]), False, bool(ctx.needs_input_grad[1])])

        def work() -> None:
            _, of_weight, _ = gradients([False, True, False])
            assert of_weight is not None
            add_gradient(weight, of_weight)

        later.put_off(work)
        return None if of_input is None else of_input.to(x.dtype), of_bias, None, None, None


def _convolution(num_dims: int) -> Callable[..., Tensor | None]:
    def run(
        later: WeightsLater, x: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor | None:  # fmt: skip
        if not _is_weight(weight, num_dims + 2) or not x.requires_grad or isinstance(padding, str):
            return None
        each = [[value] * num_dims if isinstance(value, int) else list(value) for value in (stride, padding, dilation)]
        settings = (*each, False, [0] * num_dims, groups)
        return _Convolution.apply(x, bias, _Held(weight), settings, later)  # type: ignore[no-any-return, no-untyped-call]

    return run


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul, torch.mm: _matmul,
    torch.addmm: _addmm, Tensor.addmm: _addmm,
    F.conv1d: _convolution(1), F.conv2d: _convolution(2), F.conv3d: _convolution(3),
}  # fmt: skip
