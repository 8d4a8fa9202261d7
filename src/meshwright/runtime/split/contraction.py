"""Rules for matmuls, convolutions and whatever else sums products: one rule, over the names of their dims.

    x[b s i] · W[o i] → y[b s o]      a letter for every dim; one that the result lacks is summed over

Along one axis:

    a letter of the result is cut      the result is cut there; what has the letter is narrowed to it
    a summed letter is cut             each rank has a summand of the result
    operands are cut at two letters    they are laid at one: at the weight's, for which an activation is gathered; or at one
                                       that both have and the result keeps (the heads, when queries and keys are cut by tokens);
                                       or, where the plan leaves heads alone, at the first's that the result keeps (the queries'),
                                       for which the other is gathered (keys, and values)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.collective import Axis
from meshwright.runtime.split.arguments import Args, Options, by_name
from meshwright.runtime.split.layout import Addend, Cut, Layout, cuts, lay, layout_of
from meshwright.runtime.split.pointwise import pointwise
from meshwright.runtime.split.saved import keeping_parts
from meshwright.runtime.split.splitter import NotSplit, Splitter

Run = Callable[[list[Tensor], Tensor | None], Tensor]
BATCH_LETTERS = "ABCDEFGHIJ"
ALONE = "zyxwvut"
"""For dims of size one beside larger ones: what is cut there does not concern them."""


def contract(
    split: Splitter, tensors: list[Tensor], letters: list[str], result: str, run: Run, bias: Tensor | None = None,
    bias_letter: str = "",
) -> Tensor:  # fmt: skip
    """run(parts, bias) does the work; the bias is added by it, or once, after the sum."""
    parts = [split.summed(tensor) for tensor in tensors]
    order = [axis for part in parts for axis in (layout_of(part) or {})]
    shares: Layout = {}
    for axis in sorted(split.axes):  # cp before tp: along heads it cut last
        parts, share = _settle(split, axis, parts, letters, result)
        if share is not None:
            shares[axis] = share
    layout: Layout = {axis: shares[axis] for axis in dict.fromkeys([*order, *shares]) if axis in shares}
    last_sum = next((axis for axis in reversed(layout) if isinstance(layout[axis], Addend)), None)
    if bias is not None and last_sum is not None:
        layout[last_sum] = Addend(_shaped(split.gather_dims(split.summed(bias), [0]), result, bias_letter))
        bias = None
    elif bias is not None:
        bias = _bias_part(split, bias, layout, result.index(bias_letter))
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(keeping_parts(part))
        return lay(run(parts, bias), layout)


def _settle(
    split: Splitter, axis: Axis, parts: list[Tensor], letters: list[str], result: str
) -> tuple[list[Tensor], Cut | Addend | None]:
    """The operands laid so that each rank can do its part, and how the result then lies."""
    parts = list(parts)
    found = [_cut_letter(part, names, axis) for part, names in zip(parts, letters, strict=True)]
    present = list(dict.fromkeys(letter for letter in found if letter))
    if len(present) > 1:
        present = [_at_one(split, axis, parts, letters, found, result)]
        found = [_cut_letter(part, names, axis) for part, names in zip(parts, letters, strict=True)]
    if not present:
        return parts, None
    letter = present[0]
    runs = _runs_at(letter, axis, parts, found)
    for number, names in enumerate(letters):
        if found[number] is not None:
            parts[number] = split.swap(parts[number], axis, Cut(names.index(letter), runs))
            continue
        if letter not in names:
            parts[number] = split.lend(parts[number], axis)
        elif isinstance(parts[number], nn.Parameter) and letter not in result:
            return _without(split, axis, parts, letters, found, result)
        else:
            parts[number] = split.narrow(parts[number], axis, Cut(names.index(letter), runs))
    return parts, Cut(result.index(letter), runs) if letter in result else Addend()


def _runs_at(letter: str, axis: Axis, parts: list[Tensor], found: list[str | None]) -> int:
    """In how many runs the letter is cut, by the first that is cut there."""
    return next((cuts(layout_of(part))[axis].runs for part, at in zip(parts, found, strict=True) if at == letter), 1)


def _cut_letter(part: Tensor, names: str, axis: Axis) -> str | None:
    cut = cuts(layout_of(part)).get(axis)
    return names[cut.dim] if cut else None


def _at_one(
    split: Splitter, axis: Axis, parts: list[Tensor], letters: list[str], found: list[str | None], result: str
) -> str:
    """Operands cut at several letters, laid at one: returned. The parts are replaced in place."""
    weight = next((at for part, at in zip(parts, found, strict=True) if at and isinstance(part, nn.Parameter)), None)
    kept = next((at for at in found if at and at in result), None)
    in_ring = axis == "cp" and split.context == "ring" and kept
    target = weight or (kept if in_ring else None) or _shared_letter(split, axis, parts, letters, found, result)
    runs = _runs_at(target, axis, parts, found)
    for number, names in enumerate(letters):
        if found[number] in (None, target):
            continue
        if target in names:
            parts[number] = split.swap(parts[number], axis, Cut(names.index(target), runs))
        else:
            parts[number] = split.gather(parts[number], axis, read_by_parts=True)
    return target


def _shared_letter(
    split: Splitter, axis: Axis, parts: list[Tensor], letters: list[str], found: list[str | None], result: str
) -> str:
    """One that all operands have and the result keeps: where one is cut already, else the last such that divides."""
    shared = [letter for letter in result if all(letter in names for names in letters)]
    for letter in found:
        if letter in shared:
            return str(letter)
    for letter in reversed(shared):
        sizes = [part.shape[names.index(letter)] for part, names in zip(parts, letters, strict=True)]
        if all(size % split.degrees[axis] == 0 for size in sizes):
            return letter
    raise NotSplit(
        f"a product of tensors cut along different dims over {axis}={split.degrees[axis]}, and no dim of both divides"
    )


def _without(
    split: Splitter, axis: Axis, parts: list[Tensor], letters: list[str], found: list[str | None], result: str
) -> tuple[list[Tensor], Cut | Addend | None]:
    """A whole weight sums over what is cut: tokens are cut in its place along cp; along tp the tensor is gathered."""
    for number, (at, names) in enumerate(zip(found, letters, strict=True)):
        if at is None:
            continue
        if axis == "cp" and names[-2] in result:
            runs = split.samples if len(names) == 2 else 1  # tokens of all samples in a row
            parts[number] = split.swap(parts[number], axis, Cut(len(names) - 2, runs))
            return _settle(split, axis, parts, letters, result)
        parts[number] = split.gather(parts[number], axis)
    return _settle(split, axis, parts, letters, result)


def _shaped(bias: Tensor, result: str, letter: str) -> Tensor:
    """A bias along a dim that is not the last, as it broadcasts."""
    behind = len(result) - 1 - result.index(letter)
    return bias.reshape(-1, *[1] * behind) if behind else bias


def _bias_part(split: Splitter, bias: Tensor, layout: Layout, dim: int) -> Tensor:
    bias = split.summed(bias)
    for axis, cut in cuts(layout_of(bias)).items():
        if layout.get(axis) != Cut(dim, cut.runs):
            bias = split.gather(bias, axis, read_by_parts=axis in layout)
    for axis, share in layout.items():
        if isinstance(share, Cut) and share.dim == dim:
            if axis not in cuts(layout_of(bias)):
                bias = split.narrow(bias, axis, Cut(0, share.runs))
        else:
            bias = split.lend(bias, axis)
    return bias


# ---------------------------------------------------------------- functions


def linear(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, weight, bias = by_name(args, kwargs, ("input", "weight", "bias"))
    batch = BATCH_LETTERS[: tensor.dim() - 1]
    return contract(
        split, [tensor, weight], [f"{batch}i", "oi"], f"{batch}o",
        lambda parts, own: function(parts[0], parts[1], own), bias, "o",
    )  # fmt: skip


def matmul(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    one, other = by_name(args, kwargs, ("input", "other"))[:2]
    if getattr(function, "__name__", "") == "__rmatmul__":
        one, other = other, one
    return _product(split, one, other)


def _product(split: Splitter, one: Tensor, other: Tensor, bias: Tensor | None = None) -> Tensor:
    if one.dim() == 1 or other.dim() == 1:
        raise NotSplit("a product with a vector, where one of both lies over ranks")
    letters = _matmul_letters(split.shape(one), split.shape(other))
    result = max(letters, key=len)[:-2] + "mn"
    for place, name in enumerate(result[:-2]):  # the larger of two batch dims names the result's
        if name in ALONE:
            result = result.replace(name, BATCH_LETTERS[len(result) - 3 - place])
    return contract(
        split, [one, other], letters, result,
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

    return [names(one, other, "mk"), names(other, one, "kn")]


def addmm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """bias + one · other, as Conv1D-like layers call it."""
    bias, one, other = by_name(args, kwargs, ("input", "mat1", "mat2"))
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1 or bias.dim() != 1:
        product = pointwise(split, torch.mul, (_product(split, one, other), kwargs.get("alpha", 1)), {})
        scaled = pointwise(split, torch.mul, (bias, kwargs.get("beta", 1)), {}) if kwargs.get("beta", 1) != 1 else bias
        return pointwise(split, torch.add, (product, scaled), {})
    return _product(split, one, other, bias)


def baddbmm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    added, one, other = by_name(args, kwargs, ("input", "batch1", "batch2"))
    product = pointwise(split, torch.mul, (_product(split, one, other), kwargs.get("alpha", 1)), {})
    return pointwise(split, torch.add, (product, pointwise(split, torch.mul, (added, kwargs.get("beta", 1)), {})), {})


def einsum(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    equation, *operands = args
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    equation = equation.replace(" ", "")
    if "." in equation or "->" not in equation:
        raise NotSplit(f"einsum '{equation}' of tensors that lie over ranks: name every dim, and the result's")
    inputs, result = equation.split("->")
    if any(len(set(names)) < len(names) for names in inputs.split(",")):
        raise NotSplit(f"einsum '{equation}' of tensors that lie over ranks: a dim is named twice in one of them")
    return contract(split, tensors, inputs.split(","), result, lambda parts, _: torch.einsum(equation, *parts))


def convolution(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    tensor, weight, bias, *rest = by_name(args, kwargs, names)
    settings = {name: value for name, value in zip(names[3:], rest, strict=True) if value is not None}
    groups = settings.pop("groups", 1)
    spatial = weight.dim() - 2
    if tensor.dim() != weight.dim():
        raise NotSplit("a convolution of one sample without a batch dim")
    tensor = split.gather_dims(split.summed(tensor), range(2, tensor.dim()))
    if any(cut.dim > 1 for cut in cuts(layout_of(weight)).values()):
        raise NotSplit("a convolution with a filter that is cut inside")
    out = "bo" + "XYZ"[:spatial]
    if groups == 1:
        letters = ["bi" + "xyz"[:spatial], "oi" + "uvw"[:spatial]]
        return contract(
            split, [tensor, weight], letters, out,
            lambda parts, own: function(parts[0], parts[1], own, **settings), bias, "o",
        )  # fmt: skip
    channels = split.shape(tensor)[1]
    if groups != channels or split.shape(weight)[0] != groups:
        raise NotSplit(f"a convolution in {groups} groups over {channels} channels")
    return contract(
        split, [tensor, weight], ["bo" + "xyz"[:spatial], "oi" + "uvw"[:spatial]], out,
        lambda parts, own: function(parts[0], parts[1], own, **settings, groups=parts[1].shape[0]), bias, "o",
    )  # fmt: skip
