"""Rules for functions that work element by element: what lies cut stays cut, and whole tensors are narrowed to it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.split.laying import laid
from meshwright.runtime.split.layout import Layout, cuts, lay, layout_of
from meshwright.runtime.split.rules.arguments import Args, Options, changes_its_input
from meshwright.runtime.split.rules.whole import in_place_on_whole, on_whole
from meshwright.runtime.split.splitter import NotSplit, Splitter, name_of


def pointwise(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Broadcasting functions of any number of tensors."""
    places = [n for n, value in enumerate(args) if isinstance(value, Tensor)]
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    given = [*(args[n] for n in places), *(kwargs[name] for name in names)]
    if len(given) == 1 and len(args) + len(kwargs) == 1:
        return on_whole(split, function, args, kwargs)  # where(condition) asks for places
    in_place = changes_its_input(function, args, kwargs)
    if in_place and cuts(layout_of(args[0])) != (layout_of(args[0]) or {}):
        return _into(split, function, args, kwargs)
    parts = [split.summed(tensor) for tensor in given]
    layout = joint_layout(parts)
    if in_place and list(layout.items()) != list((layout_of(args[0]) or {}).items()):
        return _into(split, function, args, kwargs)
    parts = alike(split, parts)
    new_args = list(args)
    for n, part in zip(places, parts, strict=False):
        new_args[n] = part
    new_kwargs = {**kwargs, **dict(zip(names, parts[len(places) :], strict=True))}
    return noted(function(*new_args, **new_kwargs), layout)


def _into(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """In place, where what is to be written lies otherwise than the tensor that the model holds."""
    for axis in cuts(joint_layout([value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)])):
        split.allow_gathering(axis, NotSplit(f"'{name_of(function)}' would write a part into a whole tensor"))
    return in_place_on_whole(split, function, args, kwargs)


def noted(made: Any, layout: Layout | None) -> Any:
    """The layout on what a function made, or on each of several."""
    for item in [made] if isinstance(made, Tensor) else made:
        lay(item, dict(layout or {}))
    return made


def joint_layout(tensors: list[Tensor]) -> Layout:
    """Where the result of combining them is cut. The first that is cut along an axis decides; dims count from the last."""
    most = max(tensor.dim() for tensor in tensors)
    target: Layout = {}
    for tensor in tensors:
        for axis, cut in cuts(layout_of(tensor)).items():
            target.setdefault(axis, cut.at(cut.dim + most - tensor.dim()))
    return target


def alike(split: Splitter, tensors: list[Tensor], whole_dims: Iterable[int] = ()) -> list[Tensor]:
    """The tensors laid so that they can be combined element by element. whole_dims: along these, sizes differ."""
    most = max(tensor.dim() for tensor in tensors)
    target = cuts(joint_layout(tensors))
    return [laid(split, tensor, target, most - tensor.dim(), set(whole_dims)) for tensor in tensors]


def unary(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Functions of one tensor; others among the arguments only lend their dtype."""
    tensor = split.summed(args[0])
    if tensor is not args[0] and changes_its_input(function, args, kwargs):
        return in_place_on_whole(split, function, args, kwargs)
    made = function(tensor, *args[1:], **kwargs)
    return lay(made, layout_of(tensor)) if isinstance(made, Tensor) else made  # `type()` says a name


def as_it_is(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Functions that are linear and of one tensor: addends stay addends."""
    return lay(function(*args, **kwargs), layout_of(args[0]))


def one_hot(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """A dim more, behind the others. Parts would not agree on a number of classes that is read off their values."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes < 0:
        raise NotSplit("'one_hot' without num_classes counts classes over all ranks")
    return unary(split, function, args, kwargs)


def question(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """A gradient of a split tensor is a part or a summand: only that there is none can be told."""
    found = function(*args, **kwargs)
    if isinstance(found, Tensor):
        raise NotSplit(f"'{name_of(function)}' of a tensor that lies over ranks")
    return found


def nbytes(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    return prod(split.shape(args[0])) * args[0].element_size()


def same_size(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    return split.shape(args[0]) == split.shape(args[1] if len(args) > 1 else kwargs["other"])


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
