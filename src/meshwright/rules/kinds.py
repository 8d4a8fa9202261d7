"""A cache that lives in the value its results follow from, such as a kind of block; walks along the ops of a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner")


def cached_in_value(function: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Keep the results of a function, or of a method, in its first argument, as long as that lives. A kind or a graph is no
    dictionary key, since its hash visits all of its ops.

    Further arguments must be hashable. An argument that is named is another one than the same by its place.
    """
    name = f"_known {function.__module__}.{function.__qualname__}"

    @wraps(function)
    def known(owner: Owner, /, *more: P.args, **named: P.kwargs) -> T:
        answers: dict[object, T] = owner.__dict__.setdefault(name, {})
        key = (more, *sorted(named.items())) if named else more
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
