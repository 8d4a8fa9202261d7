"""Activation checkpointing that a model brings itself (`torch.utils.checkpoint`, `gradient_checkpointing_enable()`) is left out
wherever Meshwright calls the model: what is recomputed is the plan's decision, and two answers to one question would meet.

    reentrant       its forward runs without gradients and hands on none of what stages and layouts note on tensors
    non-reentrant   its second forward runs in backward, where neither the batch nor the ranks' rules are at hand

Both call the function they were given, once, as it is. A plan that says nothing about recompute redoes the blocks of such a
model (rules/plain_plan.py), so that nobody who saved memory this way runs out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.runtime._torch import checkpoint_parts

PLANNED = "_meshwright_recompute"


class Found:
    """How often a model asked for a recompute of its own."""

    def __init__(self) -> None:
        self.num_calls = 0


_inside: list[Found] = []


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, known as one whose recompute is the plan's."""

    def redone(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    setattr(redone, PLANNED, True)
    return redone


@contextmanager
def own_recompute_left_out() -> Iterator[Found]:
    found = Found()
    _inside.append(found)
    try:
        if len(_inside) > 1:
            yield found
        else:
            with checkpoint_parts(_called_once, _not_kept):
                yield found
    finally:
        _inside.remove(found)


def _note() -> None:
    for found in _inside:
        found.num_calls += 1


def _called_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """In the place of the reentrant form."""
    _note()
    return function(*arguments)


def _not_kept(plain: Callable[..., Any], function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
    """In the place of what goes on around the non-reentrant form; a function of the plan's keeps it."""
    if getattr(function, PLANNED, False):
        return plain(function, *rest, **options)
    _note()
    return _once()


def _once() -> Generator[None]:
    """torch steps into it before the function, and out of it, or throws what the function raised, behind."""
    yield
