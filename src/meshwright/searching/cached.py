"""A cache for methods that are asked for the same thing many times in a search."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def cached(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Keep the method's results in the instance, by its arguments, which must be hashable."""
    name = f"_known_{method.__name__.lstrip('_')}"

    @wraps(method)
    def known(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        answers = self.__dict__.setdefault(name, {})
        key = (given, *named.values())
        if key not in answers:
            answers[key] = method(self, *given, **named)
        found: T = answers[key]
        return found

    return known
