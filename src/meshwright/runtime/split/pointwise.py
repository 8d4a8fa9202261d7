"""Rules for functions that work element by element: what lies cut stays cut, and whole tensors are narrowed to it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.core.collective import Axis
from meshwright.runtime.split.arguments import Args, Options
from meshwright.runtime.split.layout import NOTE, Cut, Layout, cuts, lay, layout_of
from meshwright.runtime.split.splitter import NotSplit, Splitter


def pointwise(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Broadcasting functions of any number of tensors."""
    places = [n for n, value in enumerate(args) if isinstance(value, Tensor)]
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    given = [*(args[n] for n in places), *(kwargs[name] for name in names)]
    before = layout_of(args[0]) if isinstance(args[0], Tensor) else None
    summed = [split.summed(tensor) for tensor in given]
    layout = joint_layout(summed)
    parts = alike(split, summed)
    if _changes_its_input(function) and (layout or {}) != (before or {}):
        raise NotSplit(f"'{function.__name__}' would write a part into a whole tensor")
    new_args = list(args)
    for n, part in zip(places, parts, strict=False):
        new_args[n] = part
    new_kwargs = {**kwargs, **dict(zip(names, parts[len(places) :], strict=True))}
    return lay(function(*new_args, **new_kwargs), layout)


def _changes_its_input(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def joint_layout(tensors: list[Tensor]) -> Layout:
    """Where the result of combining them is cut. The first that is cut along an axis decides; dims count from the last."""
    most = max(tensor.dim() for tensor in tensors)
    target: Layout = {}
    for tensor in tensors:
        for axis, cut in cuts(layout_of(tensor)).items():
            target.setdefault(axis, Cut(cut.dim + most - tensor.dim(), cut.runs))
    return target


def alike(split: Splitter, tensors: list[Tensor], whole_dims: Iterable[int] = ()) -> list[Tensor]:
    """The tensors laid so that they can be combined element by element. whole_dims: along these, sizes differ."""
    most = max(tensor.dim() for tensor in tensors)
    target = cuts(joint_layout(tensors))
    return [_laid(split, tensor, target, most - tensor.dim(), set(whole_dims)) for tensor in tensors]


def _laid(split: Splitter, tensor: Tensor, target: dict[Axis, Cut], missing: int, whole_dims: set[int]) -> Tensor:
    for axis, wanted in target.items():
        dim = wanted.dim - missing
        here = cuts(layout_of(tensor)).get(axis)
        has_dim = dim >= 0 and split.shape(tensor)[dim] > 1 and dim not in whole_dims
        if here == Cut(dim, wanted.runs):
            continue
        if here is not None and has_dim:
            tensor = split.swap(tensor, axis, Cut(dim, wanted.runs))
        elif here is not None:
            tensor = split.gather(tensor, axis, read_by_parts=True)
        elif has_dim:
            tensor = split.narrow(tensor, axis, Cut(dim, wanted.runs))
        else:
            tensor = split.lend(tensor, axis)
    return tensor


def unary(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Functions of one tensor; others among the arguments only lend their dtype."""
    tensor = split.summed(args[0])
    made = function(tensor, *args[1:], **kwargs)
    if not isinstance(made, Tensor):
        return made  # `type()` says a name
    made = lay(made, layout_of(tensor))
    if tensor is not args[0] and (_changes_its_input(function) or kwargs.get("inplace")):
        return _written_back(function, args[0], made)
    return made


def _written_back(function: Any, summand: Tensor, made: Tensor) -> Tensor:
    """What was done in place to a sum: the summand that the model holds becomes the result too."""
    if made.shape != summand.shape:
        raise NotSplit(f"'{function.__name__}' would write tokens of this rank into a whole tensor")
    summand.copy_(made)
    vars(summand).pop(NOTE, None)
    return lay(summand, layout_of(made))


def as_it_is(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Functions that are linear and of one tensor: addends stay addends."""
    if any(not isinstance(share, Cut) and share.bias is not None for share in (layout_of(args[0]) or {}).values()):
        return unary(split, function, args, kwargs)
    return lay(function(*args, **kwargs), layout_of(args[0]))


def one_hot(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """A dim more, behind the others. Parts would not agree on a number of classes that is read off their values."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes < 0:
        raise NotSplit("'one_hot' without num_classes counts classes over all ranks")
    return unary(split, function, args, kwargs)


def plain(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Questions whose answer is the same for a part and for the whole."""
    return function(*args, **kwargs)


def shape(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """`.shape` and `.size()`: those of the whole tensor."""
    sizes = torch.Size(split.shape(args[0]))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return sizes if dim is None else sizes[dim]


def numel(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    return prod(split.shape(args[0]))


def length(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    return split.shape(args[0])[0]
