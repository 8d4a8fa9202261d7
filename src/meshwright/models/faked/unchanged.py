"""What a forward on tensors without values leaves behind is taken away again: counters, losses of its own, filled caches.

A cache that was filled with tensors without values would be read in the real run. Kept are the attributes of all modules, and
what lies in them: lists, dicts, sets, plain objects, variables of functions. Beyond the module, caches of its classes and of
the files that define them are looked at too: there only what holds a tensor without values is undone.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from meshwright.runtime._torch import FakeTensor

MOST_KEPT = 200_000
"""Objects looked at; what lies deeper is the user's data, not a module's state."""
_NOTHING = object()
_DICTS = (dict, OrderedDict, defaultdict)
"""Others may make what they are asked for."""
_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, Tensor, range)
_BOUND = (MethodType, staticmethod, classmethod)
_OF_OTHERS = ("torch", "meshwright", "builtins", "collections", "abc", "typing", "enum", "functools")
"""Packages whose own state no model fills."""

Undo = Callable[[], None]


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    undo = [*_kept([module]), *_kept_around(module)]
    try:
        yield
    finally:
        for one in undo:
            one()


def _kept(roots: Iterable[Any]) -> Iterator[Undo]:
    """Everything that can be reached and changed."""
    waiting, seen = deque(roots), set[int]()
    while waiting and len(seen) < MOST_KEPT:
        one = waiting.popleft()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen.add(id(one))
        undo, inside = _keep(one)
        waiting.extend(inside)
        if undo is not None:
            yield undo


def _keep(one: Any) -> tuple[Undo | None, Iterable[Any]]:
    """How to undo changes of one object, and what lies in it."""
    if type(one) in _DICTS:
        return partial(_restore_dict, one, dict(one)), list(one.values())
    if isinstance(one, list | deque):
        return partial(_restore_list, one, list(one)), list(one)
    if isinstance(one, set):
        return partial(_restore_set, one, set(one)), ()
    if isinstance(one, tuple):
        return None, one
    if isinstance(one, CellType):
        held = _held(one)
        return partial(_restore_cell, one, held), (held,)
    if isinstance(one, FunctionType):
        return None, one.__closure__ or ()
    if isinstance(one, MethodType):
        return None, (one.__self__,)
    if isinstance(one, partial):
        return None, (one.func, *one.args, *one.keywords.values())
    if _is_of_others(type(one).__module__) and not isinstance(one, nn.Module):
        return None, ()
    own = getattr(one, "__dict__", None)
    return (partial(_restore_dict, own, dict(own)), list(own.values())) if isinstance(own, dict) else (None, ())


def _restore_dict(own: dict[Any, Any], before: dict[Any, Any]) -> None:
    if own.keys() != before.keys() or any(own[key] is not value for key, value in before.items()):
        own.clear()
        own.update(before)


def _restore_list(own: list[Any] | deque[Any], before: list[Any]) -> None:
    if len(own) != len(before) or any(one is not other for one, other in zip(own, before, strict=True)):
        own.clear()
        own.extend(before)


def _restore_set(own: set[Any], before: set[Any]) -> None:
    if own != before:
        own.clear()
        own.update(before)


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _NOTHING


def _restore_cell(cell: CellType, before: Any) -> None:
    if before is not _NOTHING and _held(cell) is not before:
        cell.cell_contents = before


# ---------------------------------------------------------------- beyond the module


def _kept_around(module: nn.Module) -> Iterator[Undo]:
    classes = {one for part in module.modules() for one in type(part).__mro__ if not _is_of_others(one.__module__)}
    files = {name: found for name in {one.__module__ for one in classes} if (found := sys.modules.get(name))}
    for owner in (*classes, *files.values()):
        before = dict(vars(owner))
        yield partial(_restore_names, owner, before)
        for value in before.values():
            if type(value) in _DICTS or type(value) is list:
                yield partial(_restore_values, value, value.copy())
            for cache in _caches(value):
                yield partial(_clear_cache, cache, cache.cache_info().misses)


def _is_of_others(name: str) -> bool:
    return name.partition(".")[0] in _OF_OTHERS


def _restore_names(owner: Any, before: dict[str, Any]) -> None:
    for name, value in list(vars(owner).items()):
        if value is not before.get(name, _NOTHING) and _holds_fakes(value):
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)


def _restore_values(own: dict[Any, Any] | list[Any], before: Any) -> None:
    if _holds_fakes(own):
        own.clear()
        own.update(before) if isinstance(own, dict) else own.extend(before)


def _holds_fakes(value: Any, depth: int = 3) -> bool:
    if isinstance(value, FakeTensor):
        return True
    inside = value.values() if type(value) in _DICTS else value if isinstance(value, list | tuple | set) else ()
    return depth > 0 and any(_holds_fakes(one, depth - 1) for one in list(inside))


def _caches(value: Any) -> Iterator[Any]:
    """A function whose results are kept (`functools.cache`), also one that another function stands for.

    Nothing is asked of the value itself: one that stands for a package that is not installed raises whatever it is asked."""
    function = value.__func__ if isinstance(value, _BOUND) else value
    cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
    found = (function, *map(_held, cells))
    yield from (one for one in found if callable(getattr_static(one, "cache_info", None)))


def _clear_cache(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()
