"""The rule for attention: along tp the heads come cut; along cp tokens come cut, and the plan says how they meet.

heads: an all-to-all each for query, key and value gives every rank all tokens of some heads, and what the attention made goes
back by another when the next weight reads it (runtime/split/rules/contraction.py). Heads of keys and values that several heads of
queries read are repeated where they are too few for the ranks.
ring: queries stay, keys and values go round (runtime/split/ring.py); what the attention made lies as the queries do. Where torch
itself has no fused kernel (dropout, a learned bias), keys and values are gathered, as for explicit attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.rules.context import FUSED_DIMS, key_repeats
from meshwright.runtime.split.laying import laid
from meshwright.runtime.split.layout import Cut, cuts, lay, layout_of
from meshwright.runtime.split.ring import Ring, ring_attention
from meshwright.runtime.split.rules.arguments import Args, Options, by_name
from meshwright.runtime.split.rules.pointwise import joint_layout
from meshwright.runtime.split.rules.random import apart
from meshwright.runtime.split.splitter import NotSplit, Splitter

HEADS, TOKENS = -3, -2
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    names = NAMES[:4]
    given = by_name(args, kwargs, names)
    query, key, value = (split.summed(tensor) for tensor in given[:3])
    if split.context == "ring" and any("cp" in cuts(layout_of(tensor)) for tensor in (query, key, value)):
        return _round(split, function, (query, key, value), by_name(args, kwargs, NAMES)[3:])
    if kwargs.get("enable_gqa"):
        key, value = (_repeated(split, tensor) for tensor in (key, value))
    query, key, value = _alike(split, *(_by_heads(split, tensor) for tensor in (query, key, value)))
    layout = layout_of(query) or {}
    options = {name: option for name, option in kwargs.items() if name not in names}
    mask = _mask_part(split, given[3], query)
    with apart(split, query, layout if by_name(args, kwargs, NAMES)[4] else None):
        return lay(function(query, key, value, mask, *args[4:], **options), layout)


def _repeated(split: Splitter, tensor: Tensor) -> Tensor:
    """Heads enough for every rank that gets some for its tokens."""
    heads = tensor.dim() + HEADS
    for axis, cut in cuts(layout_of(tensor)).items():
        if cut.dim > heads >= 0:
            times = key_repeats(tensor.shape[heads], split.degrees[axis])
            tensor = lay(tensor.repeat_interleave(times, heads), layout_of(tensor)) if times > 1 else tensor
    return tensor


def _alike(split: Splitter, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """All three cut along the same heads and samples. Heads of keys that several heads of queries read go with those."""
    tensors = [query, key, value]
    target = cuts(joint_layout(tensors))
    heads = query.dim() + HEADS
    counts = {split.shape(tensor)[heads] for tensor in tensors} if heads >= 0 else {1}
    along = [(axis, cut) for axis, cut in target.items() if cut.dim == heads]
    apart = len(along) > 1 or any(_divides_apart(split, tensors, axis, cut) for axis, cut in along)
    if split.shape(key)[heads] != split.shape(value)[heads] or (len(counts) > 1 and apart):
        tensors[1:] = (_times(split, tensor, split.shape(query)[heads], heads) for tensor in (key, value))
    return [laid(split, tensor, target) for tensor in tensors]


def _divides_apart(split: Splitter, tensors: list[Tensor], axis: Axis, cut: Cut) -> bool:
    """Whether a rank's heads of queries would read heads of keys that another has."""
    return cut.runs > 1 or any(split.shape(tensor)[cut.dim] % split.axes[axis].num_pieces for tensor in tensors)


def _times(split: Splitter, tensor: Tensor, num_heads: int, heads: int) -> Tensor:
    """Heads repeated until there are so many."""
    times = num_heads // split.shape(tensor)[heads]
    return lay(tensor.repeat_interleave(times, heads), layout_of(tensor))


def _by_heads(split: Splitter, tensor: Tensor) -> Tensor:
    heads = tensor.dim() + HEADS
    for axis in list(cuts(layout_of(tensor))):
        cut = cuts(layout_of(tensor)).get(axis)  # a swap along another axis may have gathered it
        if cut is None or cut.dim <= heads or (axis == "cp" and split.context == "ring"):
            continue
        if heads > 0 or (heads == 0 and tensor.shape[0] % split.axes[axis].num_pieces == 0):
            split.divide(tensor.shape[heads], axis, f"dim {heads}")
            tensor = split.swap(tensor, axis, Cut(heads))
        else:  # no dim for the heads, and samples that do not divide
            split.allow_gathering(axis, NotSplit("attention without a dim for the heads"))
            tensor = split.gather(tensor, axis)
    return tensor


# ---------------------------------------------------------------- ring


def _round(split: Splitter, function: Any, tensors: tuple[Tensor, ...], options: list[Any]) -> Tensor:
    mask, dropout, causal, scale, grouped = options
    query, key, value = (_by_heads(split, tensor) for tensor in tensors)
    _check_round((query, key, value), causal)
    if not _is_fused(query, value, mask, dropout):
        if grouped:
            times = query.shape[HEADS] // key.shape[HEADS]
            key, value = (lay(t.repeat_interleave(times, HEADS), layout_of(t)) for t in (key, value))
        return _with_all_keys(split, function, (query, key, value), options[:4])
    query, key, value = (_cast(tensor) for tensor in (query, key, value))
    ring = Ring(split.axes["cp"], bool(causal), scale or query.shape[-1] ** -0.5, _mask_part(split, mask, query))
    return lay(ring_attention(query, key, value, ring), layout_of(query))


def _check_round(tensors: tuple[Tensor, ...], causal: bool | None) -> None:
    query, key, value = tensors
    layout = cuts(layout_of(query))
    reasons = [
        ("query, key and value do not lie alike", any(cuts(layout_of(tensor)) != layout for tensor in (key, value))),
        ("tokens are cut in runs", layout.get("cp") != Cut(query.dim() + TOKENS)),
        ("queries and keys are not of the same samples", query.shape[:HEADS] != key.shape[:HEADS]),
        ("no token looks ahead, but keys are of other tokens", causal and query.shape[TOKENS] != key.shape[TOKENS]),
    ]
    for reason, applies in reasons:
        if applies:
            raise NotSplit(f"attention in a ring in which {reason}: set context to heads")


def _is_fused(query: Tensor, value: Tensor, mask: Tensor | None, dropout: float | None) -> bool:
    """Whether capture sees one op of it: torch has products of matrices for the rest."""
    is_plain = query.dim() == FUSED_DIMS and query.shape[-1] == value.shape[-1]
    return is_plain and not dropout and not (mask is not None and mask.requires_grad)


def _with_all_keys(split: Splitter, function: Any, tensors: tuple[Tensor, ...], options: list[Any]) -> Tensor:
    """As explicit attention does it: each rank has the scores of its queries, and gathers keys and values."""
    query, key, value = tensors
    mask, dropout, causal, scale = options
    ranks = split.axes["cp"]
    if causal:
        places = torch.arange(query.shape[TOKENS] * ranks.size, device=query.device)
        mask = places <= ranks.own_part(places, Cut(0))[:, None]
    else:
        mask = _mask_part(split, mask, query)
    key, value = (split.gather(tensor, "cp", read_by_parts=True) for tensor in (key, value))
    with apart(split, query, layout_of(query) if dropout else None):
        return lay(function(query, key, value, mask, dropout or 0.0, scale=scale), layout_of(query))


def _cast(tensor: Tensor) -> Tensor:
    """As autocast would, which knows nothing of kernels that are called by name."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return lay(tensor.to(torch.get_autocast_dtype(kind)), layout_of(tensor))


# ---------------------------------------------------------------- masks


def _mask_part(split: Splitter, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Whole along tokens; narrowed to this rank's heads where it has more than one."""
    if mask is None:
        return None
    mask = split.summed(mask)
    mask = split.gather_dims(mask, [mask.dim() - 2, mask.dim() - 1])
    return laid(split, mask, cuts(layout_of(query)), query.dim() - mask.dim())
