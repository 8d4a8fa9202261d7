"""Rules for functions along dims: sums and means of parts are summands, softmax and norms need their dims whole."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.runtime.split.laying import ELSEWHERE, Target, laid
from meshwright.runtime.split.layout import Addend, Layout, cuts, lay, layout_of, whole_size
from meshwright.runtime.split.rules.arguments import Args, Options, by_name, dim_of
from meshwright.runtime.split.rules.pointwise import noted, pointwise
from meshwright.runtime.split.rules.whole import without_rule
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
        axis: cut.at(cut.dim if keeps else cut.dim - sum(dim < cut.dim for dim in dims))
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
            made = _share_of_mean(split, made, tensor, axis)
    return lay(made, {**_left(tensor, dims, made), **{axis: Addend() for axis in over}})


def _share_of_mean(split: Splitter, mean: Tensor, tensor: Tensor, axis: Axis) -> Tensor:
    """Of the mean over all ranks, what the mean over this rank's part adds."""
    cut = cuts(layout_of(tensor))[axis]
    if not cut.rest:
        return mean / split.degrees[axis]
    own = tensor.shape[cut.dim]
    return mean * (own / whole_size(own, cut, split.axes[axis]))


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
    if (args[1] if len(args) > 1 else kwargs.get("dim")) is None:
        return without_rule(split, function, args, kwargs)
    tensor = split.gather_dims(split.summed(args[0]), [dim_of(args, kwargs, 1, default=-1)])
    return noted(function(tensor, *args[1:], **kwargs), layout_of(tensor))


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
        return laid(split, split.summed(value), target) if isinstance(value, Tensor) else value

    target = dict.fromkeys(cuts(layout_of(tensor)), ELSEWHERE)
    options = {name: lent(value) for name, value in kwargs.items() if name != "normalized_shape"}
    return lay(function(tensor, sizes, *map(lent, args[2:]), **options), layout_of(tensor))


def _channel_target(layout: Layout | None) -> Target:
    """How a tensor with one value a channel, which is dim 1, is read beside one that lies so."""
    return {axis: cut.at(0) if cut.dim == 1 else ELSEWHERE for axis, cut in cuts(layout).items()}


def batch_norm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """batch_norm(tensor, mean, variance, weight, bias, …): statistics of a channel need nothing of the others."""
    tensor = split.summed(args[0])
    tensor = split.gather_dims(tensor, [dim for dim in range(tensor.dim()) if dim != 1])
    for axis, cut in cuts(layout_of(tensor)).items():
        if cut.runs > 1 or axis != "tp":  # statistics would be written into a copy
            words = "statistics of channels that lie over ranks in several runs"
            split.allow_gathering(axis, NotSplit(words))
            return batch_norm(split, function, (split.gather(tensor, axis), *args[1:]), kwargs)
    target = _channel_target(layout_of(tensor))
    for axis, cut in target.items():
        for kept in by_name(args[1:], kwargs, ("running_mean", "running_var"))[:2]:
            if isinstance(kept, Tensor) and not layout_of(kept):
                split.statistics[id(kept)] = (kept, axis, cut)

    def part(value: Any) -> Any:
        return laid(split, split.summed(value), target) if isinstance(value, Tensor) and value.dim() else value

    options = {name: part(value) for name, value in kwargs.items()}
    return lay(function(tensor, *map(part, args[1:]), **options), layout_of(tensor))


def group_norm(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """group_norm(tensor, groups, weight, bias, eps): a rank that has all channels of a group has all it needs."""
    groups, weight, bias, *rest = by_name(args[1:], kwargs, ("num_groups", "weight", "bias", "eps"))
    tensor = split.summed(args[0])
    tensor = split.gather_dims(tensor, range(2, tensor.dim()))
    along = [(axis, cut) for axis, cut in cuts(layout_of(tensor)).items() if cut.dim == 1]
    if any(cut.runs > 1 or groups % split.axes[axis].num_pieces for axis, cut in along) or len(along) > 1:
        tensor, along = split.gather_dims(tensor, [1]), []
    target = _channel_target(layout_of(tensor))
    weight, bias = (laid(split, split.summed(v), target) if v is not None else None for v in (weight, bias))
    for axis, _ in along:
        groups //= split.degrees[axis]
    return lay(
        function(tensor, groups, weight, bias, *(value for value in rest if value is not None)), layout_of(tensor)
    )


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
    if split.shape(slope) in ((1,), ()):
        return pointwise(split, function, (tensor, slope), {})
    return lay(function(tensor, laid(split, slope, _channel_target(layout_of(tensor)))), layout_of(tensor))
