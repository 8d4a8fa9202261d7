"""Tensors that share memory in the whole model, but not on ranks: what a change in place of one means for the other.

A view of a tensor is often a copy on a rank: its elements were gathered or summed first. A change in place of that copy does not
reach the tensor it was taken from, which the model may read again: such a tensor is stale from then on, and reading it is refused.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch import Tensor

from meshwright.runtime.split.layout import NOTE, storage_key
from meshwright.runtime.split.rules.arguments import Args, Options, changes_its_input
from meshwright.runtime.split.splitter import NotSplit

SOURCE = "_meshwright_source"
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
    ]
)


class Stale(dict[Any, Any]):
    """The layout of a tensor whose elements were changed through a copy: nothing can be done with it."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotSplit(
            "a tensor is read after it was changed in place through a view of it, of which ranks hold a copy"
        )

    __len__ = __iter__ = __getitem__ = items = keys = values = get = __contains__ = _refuse


def follow(function: Any, args: Args, kwargs: Options, made: Any) -> None:
    """Note copies that are views in the model, and what becomes stale when one of them changes."""
    if not args or not isinstance(args[0], Tensor):
        return
    first = args[0]
    if NOTE in vars(first) and getattr(function, "__name__", "") in VIEWS:
        _note_copies(first, made)
    elif SOURCE in vars(first) and changes_its_input(function, args, kwargs):
        _make_stale(first)


def _note_copies(source: Tensor, made: Any) -> None:
    for item in made if isinstance(made, tuple | list) else (made,):
        if isinstance(item, Tensor) and item is not source and storage_key(item) != storage_key(source):
            vars(item)[SOURCE] = weakref.ref(source)


def _make_stale(tensor: Tensor) -> None:
    source = vars(tensor)[SOURCE]()
    while source is not None:
        setattr(source, NOTE, Stale())
        further = vars(source).get(SOURCE)
        source = further() if further is not None else None
