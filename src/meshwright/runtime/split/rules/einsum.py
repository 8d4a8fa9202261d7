"""The rule for einsum, in every form torch takes: with an ellipsis, without a result, by lists of numbers."""

from __future__ import annotations

from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.split.rules.arguments import Args, Options
from meshwright.runtime.split.rules.contraction import contract
from meshwright.runtime.split.rules.whole import without_rule
from meshwright.runtime.split.splitter import Splitter


def einsum(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    equation, tensors = _spelled(args)
    inputs, result = _without_ellipsis(equation, [tensor.dim() for tensor in tensors])
    if any(len(set(names)) < len(names) for names in inputs):
        return without_rule(split, torch.einsum, (equation, *tensors), {})  # a diagonal
    letters = _apart_where_one(inputs, [split.shape(tensor) for tensor in tensors])
    return contract(split, tensors, letters, result, lambda parts, _: torch.einsum(equation, *parts))


def _spelled(args: Args) -> tuple[str, list[Tensor]]:
    """einsum("ij,jk->ik", a, b), einsum("…", [a, b]) or einsum(a, [0, 1], b, [1, 2], [0, 2])"""
    if isinstance(args[0], str):
        given = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return args[0].replace(" ", ""), list(given)

    def names(numbers: Any) -> str:
        return "".join("..." if number is Ellipsis else ascii_letters[number] for number in numbers)

    result = f"->{names(args[-1])}" if len(args) % 2 else ""
    pairs = args[:-1] if len(args) % 2 else args
    return ",".join(names(numbers) for numbers in pairs[1::2]) + result, list(pairs[::2])


def _without_ellipsis(equation: str, dims: list[int]) -> tuple[list[str], str]:
    """A letter for every dim of every operand, and of the result."""
    given, arrow, result = equation.partition("->")
    free = [letter for letter in ascii_letters if letter not in equation]
    most = 0
    inputs = []
    for names, num in zip(given.split(","), dims, strict=True):
        if "..." in names:
            hidden = num - (len(names) - 3)
            most = max(most, hidden)
            names = names.replace("...", "".join(reversed(free[:hidden])))  # they are counted from the last
        inputs.append(names)
    hidden_letters = "".join(reversed(free[:most]))
    if not arrow:
        once = sorted(letter for letter in set(given) if letter.isalpha() and given.count(letter) == 1)
        return inputs, hidden_letters + "".join(once)
    return inputs, result.replace("...", hidden_letters)


def _apart_where_one(inputs: list[str], sizes: list[tuple[int, ...]]) -> list[str]:
    """A dim of size one beside a larger one of the same name gets a name of its own: it is broadcast."""
    largest: dict[str, int] = {}
    for names, own in zip(inputs, sizes, strict=True):
        for name, size in zip(names, own, strict=True):
            largest[name] = max(size, largest.get(name, 1))
    free = (chr(number) for number in range(0x100, 0x1000))
    return [
        "".join(next(free) if size == 1 < largest[name] else name for name, size in zip(names, own, strict=True))
        for names, own in zip(inputs, sizes, strict=True)
    ]
