"""Blocks with functions of their own (autograd.Function) and with hooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

WIDTH, INNER, SEQ, VOCAB, DEPTH = 16, 32, 8, 24, 4


def batch(samples: int = 8) -> dict[str, Tensor]:
    text = torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {"x": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


class Swish(Function):
    """The shape of fused kernels: backward by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


class Norm(Function):
    """Over the last dim, with a weight: needs whole rows."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        inner = gradient * weight
        of_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return of_x, (gradient * normed).flatten(0, -2).sum(0)


class Round(Function):
    """Straight through: backward knows nothing of the steps."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reverse(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


class Unit(Function):
    """Backward divides the gradient by its own length."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.norm() + 1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class AfterDown(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Swish.apply(self.down(F.relu(self.up(x))))


class InTheMiddle(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Swish.apply(self.up(self.norm(x))))


class NormByFunction(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(Norm.apply(x, self.weight))))


class StraightThrough(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Round.apply(self.down(F.relu(self.up(x))))


class QuantisedWeights(Block):
    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(F.linear(self.norm(x), Round.apply(self.up.weight), self.up.bias))
        return x + F.linear(inner, Round.apply(self.down.weight), self.down.bias)


class UnitGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Unit.apply(F.relu(self.up(x))))


class DetachTrick(Block):
    """Straight-through without a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(self.norm(x))))
        return x + y + (torch.round(y * 8) / 8 - y).detach()


class HookOnActivation(Block):
    """Gradients are clamped on their way."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(self.norm(x))))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return x + y


class HookOnInner(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.up(self.norm(x)))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
        return x + self.down(y)


class HookOnParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down.weight.register_hook(lambda gradient: gradient / (1.0 + gradient.norm()))


class ForwardHook(Block):
    """Doubles what the inner layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda module, given, made: 2 * made)


class HooksOnBlock(Block):
    """Change what the block is given and what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, given: (1.1 * given[0], *given[1:]))
        self.register_forward_hook(lambda module, given, made: 0.9 * made)


class BackwardHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down.register_full_backward_hook(lambda module, given, made: tuple(0.5 * g for g in given))


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([kind() for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adversarial(Stack):
    """Two heads; one sends its gradient back reversed."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.domain = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, VOCAB))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.domain(Reverse.apply(x))


def function_after_down():
    return Stack(AfterDown), batch()


def function_in_the_middle():
    return Stack(InTheMiddle), batch()


def norm_by_function():
    return Stack(NormByFunction), batch()


def straight_through():
    return Stack(StraightThrough), batch()


def quantised_weights():
    return Stack(QuantisedWeights), batch()


def unit_gradient():
    return Stack(UnitGradient), batch()


def detach_trick():
    return Stack(DetachTrick), batch()


def gradient_reversal():
    return Adversarial(), batch()


def hook_on_activation():
    return Stack(HookOnActivation), batch()


def hook_on_inner():
    return Stack(HookOnInner), batch()


def hook_on_parameter():
    return Stack(HookOnParameter), batch()


def forward_hook():
    return Stack(ForwardHook), batch()


def hooks_on_block():
    return Stack(HooksOnBlock), batch()


def backward_hook():
    return Stack(BackwardHook), batch()
