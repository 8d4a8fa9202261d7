"""What follows from a kind of block alone, found once: a search asks for it under every way to divide the block."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from meshwright.core.graph import Kind

P = ParamSpec("P")
T = TypeVar("T")


def once_per_kind(function: Callable[Concatenate[Kind, P], T]) -> Callable[Concatenate[Kind, P], T]:
    """Keep the answer beside the kind, for as long as that lives; a kind is no key, since its hash walks all of its ops.

    Further arguments are few and plain, and given by place.
    """

    @wraps(function)
    def known(kind: Kind, /, *more: P.args, **named: P.kwargs) -> T:
        key = (function, more)
        answers = cast("dict[object, T]", kind.__dict__)
        if key not in answers:
            answers[key] = function(kind, *more, **named)
        return answers[key]

    return known
