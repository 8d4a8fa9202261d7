"""The rule for attention: along tp the heads come cut; along cp tokens come cut, and the plan says how they meet.

heads: an all-to-all each for query, key and value gives every rank all tokens of some heads, and what the attention made goes
back by another when the next weight reads it (runtime/split/contraction.py). Heads of keys and values that several heads of
queries read are repeated where they are too few for the ranks.
ring: queries stay, keys and values go round (runtime/split/ring.py); what the attention made lies as the queries do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.core.context import key_repeats
from meshwright.runtime.split.arguments import Args, Options, by_name
from meshwright.runtime.split.dropout import seed_of_part
from meshwright.runtime.split.layout import Cut, Layout, cuts, lay, layout_of
from meshwright.runtime.split.pieces import Dropping
from meshwright.runtime.split.ring import Ring, ring_attention
from meshwright.runtime.split.splitter import NotSplit, Splitter

HEADS, TOKENS = -3, -2
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


def attention(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    names = NAMES[:4]
    given = by_name(args, kwargs, names)
    query, key, value = (split.summed(tensor) for tensor in given[:3])
    if split.context == "ring" and any("cp" in cuts(layout_of(tensor)) for tensor in (query, key, value)):
        return _round(split, (query, key, value), by_name(args, kwargs, NAMES)[3:])
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
        if cut.dim > heads and not (axis == "cp" and split.context == "ring"):
            tensor = split.swap(tensor, axis, Cut(heads))
    return tensor


# ---------------------------------------------------------------- ring


def _round(split: Splitter, tensors: tuple[Tensor, ...], options: list[Any]) -> Tensor:
    mask, dropout, causal, scale = options
    query, key, value = (_cast(_by_heads(split, tensor)) for tensor in tensors)
    layout = layout_of(query) or {}
    _check_round((query, key, value), mask, causal)
    mask = _rows_of_mask(split, mask, layout, query.dim())
    dropping = Dropping(dropout, seed_of_part(split, layout)) if dropout else None
    ring = Ring(split.axes["cp"], bool(causal), scale or query.shape[-1] ** -0.5, mask, dropping)
    return lay(ring_attention(query, key, value, ring), layout)


def _check_round(tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool | None) -> None:
    query, key, value = tensors
    reasons = [
        (
            "query, key and value do not lie alike",
            any(cuts(layout_of(t)) != cuts(layout_of(query)) for t in (key, value)),
        ),
        ("tokens are cut otherwise than in order", cuts(layout_of(query))["cp"] != Cut(query.dim() + TOKENS)),
        ("queries and keys are not of the same samples", query.shape[:HEADS] != key.shape[:HEADS]),
        ("no token looks ahead, but keys are of other tokens", causal and query.shape[TOKENS] != key.shape[TOKENS]),
        ("a bias is learned", mask is not None and mask.requires_grad),
    ]
    for reason, applies in reasons:
        if applies:
            raise NotSplit(f"attention in a ring in which {reason}: set context to heads")


def _cast(tensor: Tensor) -> Tensor:
    """As autocast would, which knows nothing of kernels that are called by name."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return lay(tensor.to(torch.get_autocast_dtype(kind)), layout_of(tensor))


def _rows_of_mask(split: Splitter, mask: Tensor | None, layout: Layout, num_dims: int) -> Tensor | None:
    """Of this rank's queries and heads, and of all keys."""
    if mask is None:
        return None
    mask = split.gather_dims(split.summed(mask), [mask.dim() - 1])
    away = num_dims - mask.dim()
    for axis, cut in cuts(layout_of(mask)).items():
        if cuts(layout).get(axis) != Cut(cut.dim + away, cut.runs):
            mask = split.gather(mask, axis)
    for axis, cut in cuts(layout).items():
        dim = cut.dim - away
        if axis not in cuts(layout_of(mask)) and dim >= 0 and split.shape(mask)[dim] > 1:
            mask = split.narrow(mask, axis, Cut(dim, cut.runs))
    return mask


# ---------------------------------------------------------------- masks


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
