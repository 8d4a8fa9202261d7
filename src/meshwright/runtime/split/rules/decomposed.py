"""Functions of torch.nn.functional that are written in Python: followed inside, where each function has a rule of its own.

Such a function first asks whether a mode wants to see it. A copy of it that does not ask runs under the Splitter.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.runtime.split.rules.arguments import Args, Options

ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def follow_inside(mode: TorchFunctionMode, function: Any, args: Args, kwargs: Options) -> Any:
    """The mode sees the functions that this one calls."""
    TorchFunctionMode.__enter__(mode)
    try:
        return silent(function)(*args, **kwargs)
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)


@cache
def silent(function: Any) -> Any:
    """The function, without the question."""
    names = {**function.__globals__, **dict.fromkeys(ASKING, _no), "_in_projection_packed": _projected}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _no(*_: Any) -> bool:
    return False


def _projected(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Queries, keys and values by one weight that holds three in a row: in pieces of it, as a weight in three runs is cut."""
    if key is value and query is key:
        return tuple(piece.contiguous() for piece in F.linear(query, weight, bias).chunk(3, dim=-1))
    weights = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
