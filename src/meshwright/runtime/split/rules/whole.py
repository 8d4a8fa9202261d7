"""The rule of last resort: a function runs on whole tensors, which every rank then has.

It is right for any function of its inputs alone, along both axes: what each rank reads is the same, and gradients of gathered and
summed tensors go the way back (runtime/split/exchange.py). Random functions are right too, since all ranks of a tp or cp group
keep the same random state. It costs an exchange: while shardings of weights are tried, such a function is refused instead, and
the weights around it stay whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.runtime._torch import OpOverloadPacket, tree_flatten, tree_leaves, tree_unflatten
from meshwright.runtime.split.aliases import sum_in_place
from meshwright.runtime.split.laying import Target, cut_as
from meshwright.runtime.split.layout import NOTE, cuts, lay, layout_of
from meshwright.runtime.split.rules.arguments import Args, Options, changes_its_input
from meshwright.runtime.split.splitter import NotSplit, Splitter, name_of

REFUSED = frozenset(
    [
        "as_strided",
        "as_strided_",
        "set_",
        "resize_",
        "resize_as_",
        "share_memory_",
        "storage",
        "_typed_storage",
        "swap_",
        "__setstate__",
        "__cuda_array_interface__",
        "__dlpack__",
        "map_",
        "apply_",
    ]
)
"""They reach into the memory of a tensor, of which a rank has a part."""


def all_whole(split: Splitter, values: Any) -> Any:
    leaves, structure = tree_flatten(values)
    return tree_unflatten([split.whole(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def on_whole(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    args, kwargs = all_whole(split, (args, kwargs))
    return function(*args, **kwargs)


def without_rule(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    name = name_of(function)
    words = f"'{name}' has no rule for tensors that lie over ranks"
    if (
        name in REFUSED
        or getattr(function, "__name__", "") in ("__get__", "__set__")
        or kwargs.get("out") is not None
        or _is_mutable(function)
    ):
        raise NotSplit(words)
    if any(isinstance(leaf, Tensor) and "tp" in cuts(layout_of(leaf)) for leaf in tree_leaves((args, kwargs))):
        split.allow_gathering("tp", NotSplit(words))
    if changes_its_input(function, args, kwargs):
        return in_place_on_whole(split, function, args, kwargs)
    return on_whole(split, function, args, kwargs)


def _is_mutable(function: Any) -> bool:
    """Whether an operator of somebody's own changes what it is given."""
    found = [getattr(function, "_schema", None)]
    if isinstance(function, OpOverloadPacket):
        found = [getattr(function, name)._schema for name in function.overloads()]
    return any(schema is not None and schema.is_mutable for schema in found)


# ---------------------------------------------------------------- in place


def in_place_on_whole(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """The function changes a whole copy; the tensor that the model holds becomes its part of that."""
    target = args[0]
    sum_in_place(split, target)
    held = split.whole(target)
    held = held if held is target else held.clone()  # what an exchange gave may be a view
    others, options = all_whole(split, (args[1:], kwargs))
    made = function(held, *others, **options)
    if held is not target:
        become(split, target, held)
    return target if made is held else made


def become(split: Splitter, target: Tensor, changed: Tensor) -> Tensor:
    """The tensor that the model holds gets its part of a whole one; summands become their sum."""
    if changed.shape != split.shape(target):
        raise NotSplit("a tensor that lies over ranks is given other sizes in place")
    sum_in_place(split, target)
    layout: Target = cuts(layout_of(target))
    target.copy_(cut_as(split, changed, layout))
    return relaid(target, layout)


def set_data(split: Splitter, function: Any, args: Args, kwargs: Options) -> None:
    """tensor.data = other"""
    tensor, other = args
    if (layout_of(tensor) or {}) != cuts(layout_of(tensor)):
        raise NotSplit("'.data' of a sum whose summands lie over ranks is set")
    function(tensor, cut_as(split, split.whole(other), cuts(layout_of(tensor))).detach())


def relaid(target: Tensor, layout: Any) -> Tensor:
    vars(target).pop(NOTE, None)
    return lay(target, layout)
