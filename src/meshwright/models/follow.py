"""Following a forward from outside its blocks.

A Follower is a function mode: it sees each torch function that is called while it is on top. Tensors that came of a block, or
of such a tensor, carry a *number*; functions that read none of them work on the batch alone and run as they are. While a block
runs nothing is followed: the block is one event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.runtime._torch import (
    FakeTensor,
    FakeTensorMode,
    _get_current_function_mode_stack,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

NUMBER = "_meshwright_number"


def number_of(leaf: Any) -> int | None:
    """None: made from the batch alone, or no tensor."""
    return getattr(leaf, NUMBER, None) if isinstance(leaf, Tensor) else None


def give_number(tensor: Tensor, number: int) -> Tensor:
    setattr(tensor, NUMBER, number)
    return tensor


def is_absent(leaf: Any) -> bool:
    """A tensor of another stage: its shape is known here, its values are not."""
    return isinstance(leaf, FakeTensor)


class Follower(TorchFunctionMode):
    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.deaf = False

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if self.deaf or all(number_of(leaf) is None for leaf in tree_leaves((arguments, options))):
            return function(*arguments, **options)
        return self.outside(function, arguments, options)

    def outside(self, function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Any:
        """A function that reads numbered tensors."""
        raise NotImplementedError

    @contextmanager
    def not_following(self) -> Iterator[None]:
        """Off the stack of modes, so that what runs in a block pays nothing; where another mode lies on top, deaf."""
        stack = _get_current_function_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)
            try:
                yield
            finally:
                self.__enter__()
        else:
            before, self.deaf = self.deaf, True
            try:
                yield
            finally:
                self.deaf = before

    def on_shapes(self, function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> tuple[Any, list[Any]]:
        """What a function would return, without its values; and the leaves of what it was called with."""
        leaves, structure = tree_flatten((arguments, options))
        stood_in = [self.stand_in(leaf) for leaf in leaves]
        replaced, named = tree_unflatten(stood_in, structure)
        with self.fakes:
            result = function(*replaced, **named)
        carry_back((arguments, options), (replaced, named))
        return result, stood_in

    def stand_in(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with self.fakes:
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)


def carry_back(given: Any, copied: Any) -> None:
    """What a call added to copies of the lists and dicts among its arguments is added to these themselves."""
    if isinstance(given, dict):
        for key, value in given.items():
            carry_back(value, copied[key])
        given.update({key: value for key, value in copied.items() if key not in given})
    elif isinstance(given, list | tuple):
        for value, copy in zip(given, copied, strict=False):
            carry_back(value, copy)
        if isinstance(given, list) and given is not copied:
            given.extend(copied[len(given) :])


def tensors_in(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def results_of(function: Callable[..., Any], arguments: Any, result: Any) -> list[Tensor]:
    """The tensors a call has made: what it returned, or what it wrote into."""
    if function is Tensor.__setitem__:
        return [arguments[0]]
    return tensors_in(result)


def is_in_place(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in [
        "add",
        "sub",
        "mul",
        "matmul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    ]
}


def is_one_of(leaf: Any, others: Iterable[Any]) -> bool:
    return any(leaf is other for other in others)
