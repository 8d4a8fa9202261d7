"""A user's `torch.autograd.Function` under the Splitter: it is given whole tensors and whole gradients, as in one process.

A function mode does not see `Function.apply`, and no rule could say what a backward written by hand does with a part. So while a
Splitter is active, `apply` asks here first:

    arguments    summed and gathered: whole along every axis, counted once along cp                    -> _whole_argument
    results      whole, and along cp their gradients are added up before the function's backward       -> run

That is right for every function of its arguments. It costs an exchange where an argument was cut, which no estimate counts.
A function that reads a tensor that lies over ranks without being given it (a module, a closure) is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshwright.runtime._torch import (
    BackwardHookFunction,
    DisableTorchFunction,
    ScriptFunction,
    ScriptMethod,
    _get_current_function_mode_stack,
    _SingleLevelFunction,
    tree_leaves,
)
from meshwright.runtime.own_backward import place_of
from meshwright.runtime.split import exchange
from meshwright.runtime.split.layout import layout_of

if TYPE_CHECKING:
    from meshwright.runtime.split.splitter import Splitter

OWN = ("meshwright.", "torch.distributed.", "torch.utils.checkpoint")
"""Functions of these modules know layouts themselves, or carry tensors through unread: `fully_shard` has one around every block,
and in torch 2.11 a recompute holds its inputs by one."""

BENEATH: Any = _SingleLevelFunction
"""The class beneath `torch.autograd.Function`."""
SCRIPTED: dict[Any, Any] = {kind: kind.__call__ for kind in (ScriptFunction, ScriptMethod)}
"""What `torch.jit.script` makes, and how it is called: its code is not Python, and would read the sizes of parts."""
_lock = threading.Lock()
_watchers = 0
_met: list[set[str]] = []


def begin_watching() -> None:
    """Until as many calls of `end_watching`, `Function.apply` passes through `_apply`, on every thread.

    The method is put beneath `Function.apply`, which looks it up at each call: a name bound before (`act = Act.apply`) is seen too.
    """
    global _watchers
    with _lock:
        _watchers += 1
        if _watchers == 1:
            BENEATH.apply = classmethod(_apply)
            for kind, call in SCRIPTED.items():
                kind.__call__ = _scripted(call)


def end_watching() -> None:
    global _watchers
    with _lock:
        _watchers -= 1
        if _watchers == 0:
            del BENEATH.apply
            for kind, call in SCRIPTED.items():
                kind.__call__ = call


@contextmanager
def functions_met(names: set[str]) -> Iterator[None]:
    """Until the end, names gets every function of the user's that is applied, with its line."""
    begin_watching()
    _met.append(names)
    try:
        yield
    finally:
        _met.remove(names)
        end_watching()


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    split = _splitter()
    plain = super(BENEATH, function).apply
    if function.__module__.startswith(OWN):
        return plain(*args, **kwargs)
    for names in _met:
        names.add(place_of(function))
    if split is None:
        return plain(*args, **kwargs)
    return run(split, function, plain, args, kwargs)


def _scripted(call: Any) -> Any:
    """A call of scripted code: on whole tensors where some lie over ranks."""

    def run_whole(function: Any, *args: Any, **kwargs: Any) -> Any:
        split = _splitter()
        if split is None or not any(
            isinstance(leaf, Tensor) and layout_of(leaf) for leaf in tree_leaves((args, kwargs))
        ):
            return call(function, *args, **kwargs)
        if split.is_trial:
            from meshwright.runtime.split.splitter import NotSplit

            raise NotSplit(f"'{function.name}' is compiled by torch.jit.script, and cannot run on parts")
        from meshwright.runtime.split.rules.whole import all_whole

        with DisableTorchFunction():
            args, kwargs = all_whole(split, (args, kwargs))
        return call(function, *args, **kwargs)

    return run_whole


def _splitter() -> Splitter | None:
    """The one whose rules are asked now; inside a rule, or in backward, none is."""
    from meshwright.runtime.split.splitter import Splitter

    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, Splitter)), None)


def run(split: Splitter, function: Any, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """plain: the function's own `apply`."""
    if function is BackwardHookFunction:
        return _hooked(split, plain, args)
    given = [_whole_argument(split, function, value) for value in args]
    before = [_version(value) for value in given]
    outer, split.reading = split.reading, place_of(function)
    try:
        made = plain(*given, **kwargs)
    finally:
        split.reading = outer
    changed = {
        id(whole): (value, whole)
        for value, whole, version in zip(args, given, before, strict=True)
        if value is not whole and _version(whole) != version
    }
    with DisableTorchFunction():
        results = [_returned(split, value, changed) for value in (made if isinstance(made, tuple) else (made,))]
    if changed:
        from meshwright.runtime.split.splitter import NotSplit

        raise NotSplit(f"{place_of(function)} changes an argument in place without `ctx.mark_dirty` and returning it")
    return tuple(results) if isinstance(made, tuple) else results[0]


def _version(value: Any) -> int:
    """How often a tensor was changed in place."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _marks_dirty(function: Any) -> bool:
    """Whether the function may change what it is given, and returns that."""
    methods = [getattr(function, name, None) for name in ("forward", "setup_context")]
    return any("mark_dirty" in getattr(getattr(method, "__code__", None), "co_names", ()) for method in methods)


def _hooked(split: Splitter, plain: Any, args: tuple[Any, ...]) -> Any:
    """A module's full backward hook: torch hangs it on the very node that is made here, so that nothing can be put behind it."""
    if any(exchange.sums_gradients(ranks) for ranks in split.axes.values()):
        from meshwright.runtime.split.splitter import NotSplit

        raise NotSplit(
            "a full backward hook of one of its modules would see this rank's share of the gradient: leave out cp, or use "
            "Tensor.register_hook"
        )
    with DisableTorchFunction():
        whole = [split.whole(value) if isinstance(value, Tensor) else value for value in args]
    return plain(*whole)


def _whole_argument(split: Splitter, function: Any, value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        _check_nested(function, value)
    if not isinstance(value, Tensor):
        return value
    with DisableTorchFunction():
        whole = split.whole(value)
        if whole.requires_grad:
            for ranks in split.axes.values():
                whole = exchange.from_own_backward(whole, ranks)
        if whole is not value and _marks_dirty(function):
            whole = whole.clone()  # what an exchange gave may be a view, which such a function must not change
    return whole


def _returned(split: Splitter, value: Any, changed: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """What the function gives; where that is an argument it changed in place, the tensor that the model holds is changed too."""
    held = changed.pop(id(value), None)
    if isinstance(value, Tensor) and value.requires_grad:
        for ranks in split.axes.values():
            value = exchange.for_own_backward(value, ranks)
    if held is None:
        return value
    from meshwright.runtime.split.rules.whole import become

    return become(split, held[0], value)


def _check_nested(function: Any, nest: Any) -> None:
    """Autograd does not follow tensors inside lists, and neither is their gradient followed here."""
    from meshwright.runtime.split.splitter import NotSplit

    inner = nest.values() if isinstance(nest, dict) else nest
    if any(isinstance(item, Tensor) and layout_of(item) for item in inner):
        raise NotSplit(
            f"{place_of(function)} is given tensors that lie over ranks inside a {type(nest).__name__}: give each by itself"
        )
