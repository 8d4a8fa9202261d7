"""Rules for functions along dims: sums and means of parts are summands, softmax and norms need their dims whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.runtime.split.arguments import Args, Options, dim_of
from meshwright.runtime.split.layout import Addend, Cut, Layout, cuts, lay, layout_of
from meshwright.runtime.split.pointwise import pointwise
from meshwright.runtime.split.splitter import Splitter


def _dims(args: Args, kwargs: Options) -> list[int]:
    """The dims a reduction runs over: all where none is named."""
    given = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    num = args[0].dim()
    if given is None:
        return list(range(num))
    return [dim % num for dim in ([given] if isinstance(given, int) else given)]


def _keeps(args: Args, kwargs: Options) -> bool:
    return bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))


def _left(layout: Layout | None, dims: list[int], keeps: bool) -> Layout:
    """Cuts of the dims that stay, where they then are."""
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
    return lay(made, {**_left(layout, dims, _keeps(args, kwargs)), **{axis: Addend() for axis in over}})


def reduce_whole(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """max, var, norm, argmax, any, …: the dims they run over are made whole."""
    if len(args) > 1 and isinstance(args[1], Tensor):
        return pointwise(split, function, args, kwargs)  # max(a, b)
    dims = _dims(args, kwargs)
    tensor = split.gather_dims(split.summed(args[0]), dims)
    made = function(tensor, *args[1:], **kwargs)
    layout = _left(layout_of(tensor), dims, _keeps(args, kwargs))
    for item in [made] if isinstance(made, Tensor) else made:
        lay(item, dict(layout))
    return made


def norm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """norm(tensor, p, dim, keepdim)"""
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    keeps = bool(args[3] if len(args) > 3 else kwargs.get("keepdim", False))
    dims = _dims((args[0], dim), {})
    tensor = split.gather_dims(split.summed(args[0]), dims)
    return lay(function(tensor, *args[1:], **kwargs), _left(layout_of(tensor), dims, keeps))


def along(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """softmax, cumsum, …: as large as what they read; the dim they run along is made whole."""
    tensor = split.gather_dims(split.summed(args[0]), [dim_of(args, kwargs, 1, default=-1)])
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

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for axis, cut in cuts(layout).items():
            if axis not in cuts(layout_of(value)):
                value = split.narrow(value, axis, Cut(0, cut.runs))
        return value

    return lay(function(tensor, *map(part, args[1:]), **{k: part(v) for k, v in kwargs.items()}), layout)


def by_channel(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Pooling and the like: each channel by itself, dims after it whole."""
    tensor = split.gather_dims(split.summed(args[0]), range(2, args[0].dim()))
    return lay(function(tensor, *args[1:], **kwargs), layout_of(tensor))


def on_whole(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Functions whose result has no use for a layout: done on whole tensors."""

    def whole(value: Any) -> Any:
        return split.gather_dims(split.summed(value), range(value.dim())) if isinstance(value, Tensor) else value

    return function(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
