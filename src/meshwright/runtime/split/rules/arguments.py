"""Arguments of torch functions, which callers give by place or by name, and whether a function changes one of them."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

Args = tuple[Any, ...]
Options = dict[str, Any]
OTHER_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""numpy's names, which torch takes everywhere."""
NOT_IN_PLACE = ("__invert__", "__index__", "__int__")


def spelled(function: Any, args: Args, kwargs: Options) -> tuple[Args, Options]:
    """As torch names the arguments; the first by place."""
    if kwargs and not inspect.isfunction(function):
        kwargs = {OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in kwargs and "condition" not in kwargs:
        return (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    return args, kwargs


def by_name(args: Args, kwargs: Options, names: tuple[str, ...]) -> list[Any]:
    """Those of a function's first parameters; None where missing."""
    return [args[n] if n < len(args) else kwargs.get(name) for n, name in enumerate(names)]


def dim_of(args: Args, kwargs: Options, place: int, default: int = 0) -> int:
    """The dim a function runs along, counted from the first."""
    found = args[place] if len(args) > place and args[place] is not None else kwargs.get("dim", default)
    return int(found) % int(args[0].dim())


def changes_its_input(function: Any, args: Args, kwargs: Options) -> bool:
    """x.relu_(), x += y, x[i] = y, F.relu(x, inplace=True)"""
    if _is_in_place(function):
        return True
    place = _place_of_inplace(function)
    return bool(kwargs.get("inplace", args[place] if place is not None and len(args) > place else False))


@cache
def _is_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in NOT_IN_PLACE)
    return bool(name.endswith("_"))


@cache
def _place_of_inplace(function: Any) -> int | None:
    if not inspect.isfunction(function):
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # a method of Tensor, wrapped
        return None
    return names.index("inplace") if "inplace" in names else None
