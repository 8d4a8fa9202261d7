"""What follows from a kind of block alone is kept in it, since a search asks for it under every sharding; walks along its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from meshwright.core.graph import Graph, Kind

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", Kind, Graph)


def cached_in_value(function: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Keep the function's results in the kind or graph itself, as long as it lives. It is no dictionary key, since its hash visits
    all of its ops.

    Further arguments must be few, hashable and positional.
    """

    @wraps(function)
    def known(owner: Owner, /, *more: P.args, **named: P.kwargs) -> T:
        key = (function, more)
        answers = cast("dict[object, T]", owner.__dict__)
        if key not in answers:
            answers[key] = function(owner, *more, **named)
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
