"""Rules for functions along dims: sums and means of parts are summands, softmax and norms need their dims whole."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from meshwright.runtime.split.arguments import Args, Options, by_name, dim_of
from meshwright.runtime.split.layout import Addend, Cut, Layout, cuts, lay, layout_of
from meshwright.runtime.split.pointwise import pointwise
from meshwright.runtime.split.splitter import NotSplit, Splitter


def _dims(args: Args, kwargs: Options) -> list[int]:
    """The dims a reduction runs over: all where none is named. var(tensor, unbiased) names none."""
    given = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    num = args[0].dim()
    if given is None or isinstance(given, bool) or given == () or given == []:
        return list(range(num))
    return [dim % num for dim in ([given] if isinstance(given, int) else given)]


def _left(tensor: Tensor, dims: list[int], made: Tensor) -> Layout:
    """Cuts of the dims that stay, where they then are: in what was made, reduced dims have size one or are gone."""
    keeps, layout = made.dim() == tensor.dim(), layout_of(tensor)
    return {
        axis: Cut(cut.dim if keeps else cut.dim - sum(dim < cut.dim for dim in dims), cut.runs)
        for axis, cut in cuts(layout).items()
        if cut.dim not in dims
    }


def sum_or_mean(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor = split.summed(args[0])
    if not tensor.is_floating_point():
        return reduce_whole(split, function, (tensor, *args[1:]), kwargs)
    dims, layout = _dims(args, kwargs), layout_of(tensor)
    made = function(tensor, *args[1:], **kwargs)
    over = [axis for axis, cut in cuts(layout).items() if cut.dim in dims]
    for axis in over:
        if function.__name__ == "mean":
            made = made / split.degrees[axis]
    return lay(made, {**_left(tensor, dims, made), **{axis: Addend() for axis in over}})


def reduce_whole(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """max, var, norm, argmax, any, …: the dims they run over are made whole."""
    if isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
        return pointwise(split, function, args, kwargs)  # max(a, b)
    dims = _dims(args, kwargs)
    tensor = split.gather_dims(split.summed(args[0]), dims)
    made = function(tensor, *args[1:], **kwargs)
    for item in [made] if isinstance(made, Tensor) else made:
        lay(item, _left(tensor, dims, item))
    return made


def norm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """norm(tensor, p, dim, keepdim)"""
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    dims = _dims((args[0], dim), {})
    tensor = split.gather_dims(split.summed(args[0]), dims)
    made = function(tensor, *args[1:], **kwargs)
    return lay(made, _left(tensor, dims, made))


def along(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """softmax, cumsum, …: as large as what they read; the dim they run along is made whole."""
    if kwargs.get("dim", 0) is None:
        raise NotSplit(f"'{function.__name__}' that is not told its dim")
    tensor = split.gather_dims(split.summed(args[0]), [dim_of(args, kwargs, 1, default=-1)])
    if tensor is not args[0] and function.__name__.endswith("_"):
        raise NotSplit(f"'{function.__name__}' in place, along a dim that lies over ranks")
    return lay(function(tensor, *args[1:], **kwargs), layout_of(tensor))


def last_two(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """triu, tril: the last two dims are made whole."""
    num = args[0].dim()
    tensor = split.gather_dims(split.summed(args[0]), [num - 2, num - 1])
    return lay(function(tensor, *args[1:], **kwargs), layout_of(tensor))


def layer_norm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """layer_norm and rms_norm(tensor, sizes, weight, …): over the last dims."""
    tensor = split.summed(args[0])
    sizes = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    num = 1 if isinstance(sizes, int) else len(sizes)
    tensor = split.gather_dims(tensor, range(tensor.dim() - num, tensor.dim()))

    def lent(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = split.summed(value)
            for axis in cuts(layout_of(value)):
                value = split.gather(value, axis, read_by_parts=axis in (layout_of(tensor) or {}))
        for axis in layout_of(tensor) or {}:
            value = split.lend(value, axis) if isinstance(value, Tensor) else value
        return value

    made = function(
        tensor, sizes, *map(lent, args[2:]), **{k: lent(v) for k, v in kwargs.items() if k != "normalized_shape"}
    )
    return lay(made, layout_of(tensor))


def batch_norm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """batch_norm(tensor, mean, variance, weight, bias, …): statistics of a channel need nothing of the others."""
    tensor = split.summed(args[0])
    tensor = split.gather_dims(tensor, [dim for dim in range(tensor.dim()) if dim != 1])
    layout = layout_of(tensor)
    if any(cut.runs > 1 for cut in cuts(layout).values()):
        raise NotSplit("statistics of channels that lie over ranks in several runs")  # would be written into a copy

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = split.summed(value)
        for axis, cut in cuts(layout_of(value)).items():
            if layout is None or layout.get(axis) != Cut(1, cut.runs):
                value = split.gather(value, axis, read_by_parts=axis in (layout or {}))
        for axis, cut in cuts(layout).items():
            if axis not in cuts(layout_of(value)):
                value = split.narrow(value, axis, Cut(0, cut.runs))
        return value

    return lay(function(tensor, *map(part, args[1:]), **{k: part(v) for k, v in kwargs.items()}), layout)


def by_channel(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Pooling and the like: each channel by itself, dims after it whole. Their number is in the name: a batch may be missing."""
    num, found = args[0].dim(), re.search(r"(\d)d", function.__name__)
    spatial = int(found[1]) if found else num - 2
    tensor = split.gather_dims(split.summed(args[0]), range(num - spatial, num))
    return noted(function(tensor, *args[1:], **kwargs), layout_of(tensor))


def pad(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """pad(tensor, (before, after, …)): pairs from the last dim on; the dims that grow are made whole."""
    sizes = args[1] if len(args) > 1 else kwargs["pad"]
    num = args[0].dim()
    grown = [num - 1 - place // 2 for place, size in enumerate(sizes) if size]
    tensor = split.gather_dims(split.summed(args[0]), grown)
    return lay(function(tensor, *args[1:], **kwargs), layout_of(tensor))


def prelu(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """prelu(tensor, weight): one slope for all, or one a channel, which is dim 1."""
    tensor, slope = (split.summed(value) for value in by_name(args, kwargs, ("input", "weight")))
    layout = layout_of(tensor)
    if split.shape(slope) == (1,):
        return pointwise(split, function, (tensor, slope), {})
    if layout is None or "tp" in cuts(layout_of(slope)) or "cp" in cuts(layout_of(slope)):
        tensor, slope = split.gather_dims(tensor, [1]), split.gather_dims(slope, [0])
        layout = layout_of(tensor)
    for axis, cut in cuts(layout).items():
        slope = split.narrow(slope, axis, Cut(0, cut.runs)) if cut.dim == 1 else split.lend(slope, axis)
    return lay(function(tensor, slope), layout)


def noted(made: Any, layout: Layout | None) -> Any:
    """The layout on what a function made, or on each of several."""
    for item in [made] if isinstance(made, Tensor) else made:
        lay(item, dict(layout or {}))
    return made


def on_whole(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Functions whose result has no use for a layout: done on whole tensors."""

    def whole(value: Any) -> Any:
        return split.gather_dims(split.summed(value), range(value.dim())) if isinstance(value, Tensor) else value

    return function(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
