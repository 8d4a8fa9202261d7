"""Samples drawn at random: programs of several functions, indices, equations of einsum, on tensors of random sizes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from split_samples import Sample, real, weight
from split_ways import Choose
from torch import Tensor

Step = Callable[[Tensor], Tensor]


def program(choose: Choose) -> Sample:
    """Views, pieces and sums in a row; a product with a weight at the end, which must find its elements where it expects them."""
    sizes = tuple(choose([(2, 4, 8), (4, 8), (2, 2, 4, 4), (4, 4, 4), (2, 12, 4)]))
    steps: list[tuple[str, Step]] = []
    now = sizes
    for _ in range(choose([1, 2, 3, 4])):
        name, step, now = _step(now, choose)
        steps.append((name, step))
    end = choose(["none", "linear", "add"])
    other = {"none": (), "linear": (weight(4, now[-1]),), "add": (real(*now, seed=9),)}[end]

    def call(tensor: Tensor, *others: Tensor) -> Tensor:
        for _, step in steps:
            tensor = step(tensor)
        if end == "linear":
            return F.linear(tensor, *others)
        return tensor + others[0] if end == "add" else tensor

    return Sample(" ".join(name for name, _ in steps) + f" {end}", call, (real(*sizes), *other))


def _step(sizes: tuple[int, ...], choose: Choose) -> tuple[str, Step, tuple[int, ...]]:
    num = len(sizes)
    kind = choose(["reshape", "reshape", "permute", "shuffle", "halves", "slice", "scale", "unsqueeze"])
    dim = choose(range(num))
    if kind == "reshape":
        new = _regrouped(sizes, choose)
        return f"reshape{new}", lambda t: t.reshape(new), new
    if kind == "permute":
        order = list(range(num))
        order.insert(choose(range(num)), order.pop(dim))
        return f"permute{order}", lambda t: t.permute(order), tuple(sizes[d] for d in order)
    if kind == "shuffle" and sizes[dim] % 2 == 0:
        groups = choose([n for n in (2, 4, sizes[dim] // 2) if n and sizes[dim] % n == 0])
        wide = (*sizes[:dim], groups, sizes[dim] // groups, *sizes[dim + 1 :])
        return f"shuffle{dim}/{groups}", lambda t: t.view(wide).transpose(dim, dim + 1).reshape(sizes), sizes
    if kind == "halves" and sizes[dim] % 2 == 0:
        return f"halves{dim}", lambda t: torch.cat([-t.chunk(2, dim)[1], t.chunk(2, dim)[0]], dim), sizes
    if kind == "slice" and sizes[dim] % 4 == 0:
        index = (slice(None),) * dim + (slice(None, sizes[dim] // 2),)
        return f"slice{dim}", lambda t: t[index], (*sizes[:dim], sizes[dim] // 2, *sizes[dim + 1 :])
    if kind == "unsqueeze" and num < 5:
        return f"unsqueeze{dim}", lambda t: t.unsqueeze(dim), (*sizes[:dim], 1, *sizes[dim:])
    return "scale", lambda t: t * 1.5, sizes


def _regrouped(sizes: tuple[int, ...], choose: Choose) -> tuple[int, ...]:
    """As many elements, in other sizes."""
    factors = [f for size in sizes for f in _factors(size)]
    found = []
    while factors:
        take = choose(range(1, len(factors) + 1)) if len(found) < 3 else len(factors)
        found.append(prod(factors[:take]))
        factors = factors[take:]
    return tuple(found) or (1,)


def _factors(size: int) -> list[int]:
    for factor in (2, 3, 5):
        if size % factor == 0:
            return [factor, *_factors(size // factor)]
    return [size] if size > 1 else []


def index(choose: Choose) -> Sample:
    sizes = (4, 4, 8)
    items: list[Any] = []
    for size in sizes:
        ways = ["all", "all", "slice", "number", "step", "list", "tensor", "mask", "none", "stop"]
        kind = choose(ways)
        if kind == "stop":
            break
        items += {
            "all": [slice(None)], "slice": [slice(1, size - 1)], "number": [choose([0, size - 1, -1])],
            "step": [slice(None, None, 2)], "list": [[1, 0]], "tensor": [torch.tensor([2, 0])], "mask": [torch.arange(size) < 2],
            "none": [None, slice(None)],
        }[kind]  # fmt: skip
    where = choose([None, len(items)])
    picked = tuple(items) if where is None or len(items) >= len(sizes) else (*items, Ellipsis)
    if choose([True, False]):
        return Sample(f"getitem {picked}", lambda t: t[picked], (real(*sizes),))
    value = choose([0.5, real(8, seed=5), real(1, seed=5)])

    def write(tensor: Tensor, *others: Tensor) -> Tensor:
        held = tensor * 1.0
        held[picked] = others[0] if others else value
        return held

    return Sample(f"setitem {picked}", write, (real(*sizes), *([value] if isinstance(value, Tensor) else [])))


def equation(choose: Choose) -> Sample:
    letters, sizes = "abcd", {"a": 4, "b": 2, "c": 8, "d": 4}
    operands = []
    for _ in range(choose([1, 2, 2, 3])):
        names = "".join(letter for letter in letters if choose([True, True, False])) or "ac"
        operands.append(choose([names, names[::-1]]))
    used = [letter for letter in letters if any(letter in names for names in operands)]
    kept = [letter for letter in used if choose([True, True, False])]
    result = "".join(choose([kept, kept[::-1]]))
    tensors = tuple(real(*(sizes[letter] for letter in names), seed=n) for n, names in enumerate(operands))
    form = choose(["plain", "implicit", "dots", "lists"])
    if form == "lists":
        numbers = [[letters.index(letter) for letter in names] for names in operands]
        target = [letters.index(letter) for letter in result]
        return Sample(
            f"einsum {numbers} {target}",
            lambda *t: torch.einsum(*(one for pair in zip(t, numbers, strict=True) for one in pair), target),
            tensors,
        )
    written = ",".join(operands) + ("" if form == "implicit" else f"->{result}")
    if form == "dots" and all(names.startswith("a") for names in operands):
        written = ",".join("..." + names[1:] for names in operands) + "->..." + result.replace("a", "")
    return Sample(f"einsum {written}", lambda *t: torch.einsum(written, *t), tensors)
