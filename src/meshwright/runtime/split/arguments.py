"""Arguments of torch functions, which callers give by place or by name."""

from __future__ import annotations

from typing import Any

Args = tuple[Any, ...]
Options = dict[str, Any]


def by_name(args: Args, kwargs: Options, names: tuple[str, ...]) -> list[Any]:
    """Those of a function's first parameters; None where missing."""
    return [args[n] if n < len(args) else kwargs.get(name) for n, name in enumerate(names)]


def dim_of(args: Args, kwargs: Options, place: int, default: int = 0) -> int:
    """The dim a function runs along, counted from the first."""
    found = args[place] if len(args) > place and args[place] is not None else kwargs.get("dim", default)
    return int(found) % int(args[0].dim())
