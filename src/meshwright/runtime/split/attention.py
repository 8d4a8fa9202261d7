"""The rule for attention: heads are cut, tokens are whole.

Along tp the heads come cut. Along cp tokens come cut: an all-to-all each for query, key and value gives every rank all tokens of
some heads, and what the attention made goes back by another when the next weight reads it (runtime/split/contraction.py).
Heads of keys and values that several heads of queries read are repeated where they are too few for the ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.core.attention import key_repeats
from meshwright.runtime.split.arguments import Args, Options, by_name
from meshwright.runtime.split.layout import Cut, cuts, lay, layout_of
from meshwright.runtime.split.splitter import NotSplit, Splitter

HEADS = -3


def attention(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    names = ("query", "key", "value", "attn_mask")
    given = by_name(args, kwargs, names)
    query, key, value = (split.summed(tensor) for tensor in given[:3])
    if kwargs.get("enable_gqa"):
        key, value = (_repeated(split, tensor) for tensor in (key, value))
    query, key, value = (_by_heads(split, tensor) for tensor in (query, key, value))
    layout = layout_of(query) or {}
    if any(cuts(layout_of(tensor)) != cuts(layout) for tensor in (key, value)):
        raise NotSplit("attention in which query, key and value do not lie alike")
    options = {name: option for name, option in kwargs.items() if name not in names}
    mask = _mask_part(split, given[3], query)
    return lay(function(query, key, value, mask, *args[4:], **options), layout)


def _repeated(split: Splitter, tensor: Tensor) -> Tensor:
    """Heads enough for every rank that gets some for its tokens."""
    heads = tensor.dim() + HEADS
    for axis, cut in cuts(layout_of(tensor)).items():
        if cut.dim > heads >= 0:
            times = key_repeats(tensor.shape[heads], split.degrees[axis])
            tensor = lay(tensor.repeat_interleave(times, heads), layout_of(tensor)) if times > 1 else tensor
    return tensor


def _by_heads(split: Splitter, tensor: Tensor) -> Tensor:
    if tensor.dim() < 4:
        raise NotSplit("attention without a dim for the heads")
    heads = tensor.dim() + HEADS
    for axis, cut in cuts(layout_of(tensor)).items():
        if cut.dim > heads:
            tensor = split.swap(tensor, axis, Cut(heads))
    return tensor


def _mask_part(split: Splitter, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Whole along tokens; narrowed to this rank's heads where it has more than one."""
    if mask is None:
        return None
    mask = split.summed(mask)
    mask = split.gather_dims(mask, [mask.dim() - 2, mask.dim() - 1])
    away = query.dim() - mask.dim()
    for axis, cut in cuts(layout_of(mask)).items():
        if cuts(layout_of(query)).get(axis) != Cut(cut.dim + away, cut.runs):
            mask = split.gather(mask, axis, read_by_parts=axis in cuts(layout_of(query)))
    for axis, cut in cuts(layout_of(query)).items():
        dim = cut.dim - away
        if axis in cuts(layout_of(mask)):
            continue
        if dim >= 0 and split.shape(mask)[dim] > 1:
            mask = split.narrow(mask, axis, Cut(dim, cut.runs))
        else:
            mask = split.lend(mask, axis)
    return mask
