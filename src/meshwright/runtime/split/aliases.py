"""Tensors that share memory in the whole model: what a change in place of one means for the others.

    a copy on a rank      a view is often one: its elements were gathered or summed first. When either of the two is changed, the
                          other is stale from then on, and reading it is refused                                   -> follow
    memory on a rank      parts stay parts. But where summands become their sum in place, so must all that shares
                          that memory, else it would be added up a second time                                     -> sum_in_place

Tensors of one family know each other: a tensor, its views, and theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from meshwright.runtime.split.layout import NOTE, cuts, lay, layout_of, storage_key
from meshwright.runtime.split.rules.arguments import Args, Options, changes_its_input
from meshwright.runtime.split.splitter import NotSplit, Splitter

FAMILY = "_meshwright_family"
VIEWS = frozenset(
    [
        "view",
        "reshape",
        "view_as",
        "reshape_as",
        "flatten",
        "unflatten",
        "ravel",
        "transpose",
        "swapaxes",
        "swapdims",
        "t",
        "permute",
        "movedim",
        "moveaxis",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "select",
        "narrow",
        "__getitem__",
        "diagonal",
        "unfold",
        "detach",
        "view_as_real",
        "view_as_complex",
        "contiguous",
        "T",
        "mT",
        "H",
        "mH",
        "real",
        "imag",
        "data",
        "__get__",
        "adjoint",
        "conj",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
    ]
)


class Stale(dict[Any, Any]):
    """The layout of a tensor whose elements were changed through a copy: nothing can be done with it."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotSplit(
            "a tensor is read after it was changed in place through a view of it, or it is a view of one that was, of which ranks "
            "hold a copy: take the view after the change, or change a clone"
        )

    __len__ = __iter__ = __getitem__ = items = keys = values = get = __contains__ = _refuse


def follow(function: Any, args: Args, kwargs: Options, made: Any) -> None:
    """Note tensors that are views in the model, and what becomes stale when one of them changes."""
    if not args or not isinstance(args[0], Tensor):
        return
    first = args[0]
    noted = vars(first)
    if (NOTE in noted or FAMILY in noted) and getattr(function, "__name__", "") in VIEWS:
        join(first, made if isinstance(made, tuple | list) else (made,))
    elif FAMILY in noted and changes_its_input(function, args, kwargs):
        _make_stale(first)


def join(source: Tensor, views: Iterable[Any]) -> None:
    """Views become of the family of the tensor they were taken from."""
    for view in views:
        if isinstance(view, Tensor) and view is not source and _may_share(view, source):
            family = vars(source).setdefault(FAMILY, [weakref.ref(source)])
            family[:] = [member for member in family if member() is not None] + [weakref.ref(view)]
            vars(view)[FAMILY] = family


def _may_share(view: Tensor, source: Tensor) -> bool:
    """Not if it was converted: a complex tensor shares with its real view, other dtypes are copies in the model too."""
    return view.dtype.to_real() == source.dtype.to_real()


def _others(tensor: Tensor) -> list[Tensor]:
    found = [member() for member in vars(tensor).get(FAMILY, ())]
    return [other for other in found if other is not None and other is not tensor]


def _make_stale(changed: Tensor) -> None:
    key = storage_key(changed)
    for other in _others(changed):
        if storage_key(other) != key:
            setattr(other, NOTE, Stale())


def sum_in_place(split: Splitter, tensor: Tensor) -> None:
    """Before a tensor of summands is changed in place: where others share its memory, all of them become sums."""
    if cuts(layout_of(tensor)) == (layout_of(tensor) or {}):
        return
    key = storage_key(tensor)
    sharing = [other for other in _others(tensor) if storage_key(other) == key]
    if not sharing:
        return
    base = tensor if tensor._base is None else tensor._base
    if not any(base is member for member in (tensor, *sharing)):
        raise NotSplit("a partial sum is changed in place through one of several views of it: change a clone")
    base.copy_(split.totalled(base))
    for member in (tensor, *sharing):
        whole = cuts(layout_of(member))
        vars(member).pop(NOTE, None)
        lay(member, dict(whole))
