"""Rules for matmuls, convolutions and whatever else sums products: one rule, over the names of their dims (operands.py)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from meshwright.runtime.split.laying import ELSEWHERE, laid
from meshwright.runtime.split.layout import Addend, Layout, cuts, lay, layout_of
from meshwright.runtime.split.rules.arguments import Args, Options, by_name
from meshwright.runtime.split.rules.operands import Operands, Run
from meshwright.runtime.split.rules.pointwise import pointwise
from meshwright.runtime.split.rules.whole import on_whole, without_rule
from meshwright.runtime.split.splitter import NotSplit, Splitter

BATCH_LETTERS = "ABCDEFGHIJ"
ALONE = "zyxwvut"
"""For dims of size one beside larger ones: what is cut there does not concern them."""


def contract(
    split: Splitter, tensors: list[Tensor], letters: list[str], result: str, run: Run, bias: Tensor | None = None,
    bias_letter: str = "",
) -> Tensor:  # fmt: skip
    """run(parts, bias) does the work; the bias is added by it, or once, after the sum."""
    operands = Operands(split, tensors, letters, result)
    layout = operands.settle()
    if bias is None:
        return lay(operands.run(run, None), layout)
    dim = result.index(bias_letter)
    last_sum = next((axis for axis in reversed(layout) if isinstance(layout[axis], Addend)), None)
    if last_sum is None:
        return lay(operands.run(run, _bias_part(split, bias, layout, dim)), layout)
    whole = _shaped(split.gather_dims(split.summed(bias), [0]), len(result) - 1 - dim)
    if any(cut.dim == dim for cut in cuts(layout).values()):  # the bias of a sum is whole
        made = split.summed(lay(operands.run(run, None), layout))
        return cast(Tensor, pointwise(split, torch.add, (made, whole), {}))
    return lay(operands.run(run, None), {**layout, last_sum: Addend(whole)})


def _shaped(bias: Tensor, behind: int) -> Tensor:
    """A bias along a dim that is not the last, as it broadcasts."""
    return bias.reshape(-1, *[1] * behind) if behind else bias


def _bias_part(split: Splitter, bias: Tensor, layout: Layout, dim: int) -> Tensor:
    target = {axis: cut.at(0) if cut.dim == dim else ELSEWHERE for axis, cut in cuts(layout).items()}
    return laid(split, split.summed(bias), target)


# ---------------------------------------------------------------- functions


def linear(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, weight, bias = by_name(args, kwargs, ("input", "weight", "bias"))
    batch = BATCH_LETTERS[: tensor.dim() - 1]
    if weight.dim() == 1:
        return without_rule(split, function, args, kwargs)
    return contract(
        split, [tensor, weight], [f"{batch}i", "oi"], f"{batch}o",
        lambda parts, own: function(parts[0], parts[1], own), bias, "o",
    )  # fmt: skip


def matmul(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """matmul and all it stands for: mm, bmm, mv, dot."""
    names = ("input", next((name for name in ("mat2", "vec", "tensor") if name in kwargs), "other"))
    one, other = by_name(args, kwargs, names)
    if getattr(function, "__name__", "") == "__rmatmul__":
        one, other = other, one
    return product(split, one, other)


def product(split: Splitter, one: Tensor, other: Tensor, bias: Tensor | None = None) -> Tensor:
    letters = _matmul_letters(split.shape(one), split.shape(other))
    ends = ("m" if one.dim() > 1 else "") + ("n" if other.dim() > 1 else "")
    batch = max((names[:-2] for names in letters), key=len)
    for place, name in enumerate(batch):  # the larger of two batch dims names the result's
        if name in ALONE:
            batch = batch.replace(name, BATCH_LETTERS[len(batch) - 1 - place])
    return contract(
        split, [one, other], letters, batch + ends,
        lambda parts, own: parts[0] @ parts[1] if own is None else torch.addmm(own, parts[0], parts[1]), bias, "n",
    )  # fmt: skip


def _matmul_letters(one: tuple[int, ...], other: tuple[int, ...]) -> list[str]:
    """Batch dims are named from the last; one of size one beside a larger one has a name of its own."""
    alone = iter(ALONE)

    def names(own: tuple[int, ...], beside: tuple[int, ...], last: str) -> str:
        found = ""
        for back in range(len(own) - 2, 0, -1):
            size = own[-2 - back]
            larger = len(beside) >= back + 2 and beside[-2 - back] > 1 and size == 1
            found += next(alone) if larger else BATCH_LETTERS[back - 1]
        return found + last

    return [names(one, other, "mk" if len(one) > 1 else "k"), names(other, one, "kn" if len(other) > 1 else "k")]


def outer(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    one, other = args[0], args[1] if len(args) > 1 else kwargs["vec2"]
    return contract(split, [one, other], ["m", "n"], "mn", lambda parts, _: function(*parts))


def addmm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """bias + one · other, as Conv1D-like layers call it."""
    bias, one, other = by_name(args, kwargs, ("input", "mat1", "mat2"))
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1 or bias.dim() != 1 or split.shape(bias)[0] == 1:
        return _scaled_sum(split, bias, product(split, one, other), kwargs)
    return product(split, one, other, bias)


def baddbmm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    added, one, other = by_name(args, kwargs, ("input", "batch1", "batch2"))
    return _scaled_sum(split, added, product(split, one, other), kwargs)


def _scaled_sum(split: Splitter, added: Tensor, made: Tensor, kwargs: Options) -> Any:
    """beta · added + alpha · made"""
    made = pointwise(split, torch.mul, (made, kwargs.get("alpha", 1)), {})
    if kwargs.get("beta", 1) == 0:
        return pointwise(split, torch.add, (made, 0), {})  # as torch has it, whatever is in what is added
    return pointwise(split, torch.add, (made, pointwise(split, torch.mul, (added, kwargs.get("beta", 1)), {})), {})


def convolution(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    tensor, weight, bias, *rest = by_name(args, kwargs, names)
    settings = {name: value for name, value in zip(names[3:], rest, strict=True) if value is not None}
    groups = settings.pop("groups", 1)
    spatial = weight.dim() - 2
    if tensor.dim() != weight.dim():
        return without_rule(split, function, args, kwargs)  # one sample without a batch dim
    tensor = split.gather_dims(split.summed(tensor), range(2, tensor.dim()))
    weight = split.gather_dims(split.summed(weight), range(2, weight.dim()))
    out = "bo" + "XYZ"[:spatial]
    if groups == 1:
        letters = ["bi" + "xyz"[:spatial], "oi" + "uvw"[:spatial]]
        return contract(
            split, [tensor, weight], letters, out,
            lambda parts, own: function(parts[0], parts[1], own, **settings), bias, "o",
        )  # fmt: skip
    channels = split.shape(tensor)[1]
    if groups != channels or split.shape(weight)[0] != groups:
        for axis in cuts(layout_of(weight)) or cuts(layout_of(tensor)):
            split.allow_gathering(axis, NotSplit(f"a convolution in {groups} groups over {channels} channels"))
        return on_whole(split, function, (tensor, weight, bias), {**settings, "groups": groups})
    return contract(
        split, [tensor, weight], ["bo" + "xyz"[:spatial], "oi" + "uvw"[:spatial]], out,
        lambda parts, own: function(parts[0], parts[1], own, **settings, groups=parts[1].shape[0]), bias, "o",
    )  # fmt: skip
