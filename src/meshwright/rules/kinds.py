"""What follows from a kind of block alone is kept in it, since a search asks for it under every sharding; walks along its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from meshwright.core.graph import Kind

P = ParamSpec("P")
T = TypeVar("T")


def cached_per_kind(function: Callable[Concatenate[Kind, P], T]) -> Callable[Concatenate[Kind, P], T]:
    """Keep the function's results in the kind itself, as long as the kind lives. A kind is no dictionary key, since its hash visits
    all of its ops.

    Further arguments must be few, hashable and positional.
    """

    @wraps(function)
    def known(kind: Kind, /, *more: P.args, **named: P.kwargs) -> T:
        key = (function, more)
        answers = cast("dict[object, T]", kind.__dict__)
        if key not in answers:
            answers[key] = function(kind, *more, **named)
        return answers[key]

    return known


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """All that can be reached, step by step; the starts are in it."""
    seen = set(starts)
    waiting = list(seen)
    while waiting:
        new = set(following(waiting.pop())) - seen
        seen |= new
        waiting += new
    return seen
