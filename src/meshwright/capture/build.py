"""Build a module on `meta` without filling its tensors: they have no memory, and drawing nothing still takes its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FILLING = ("normal_", "uniform_", "zero_", "fill_", "trunc_normal_", "copy_")


class _Unfilled(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if getattr(function, "__name__", "") in _FILLING or getattr(function, "__module__", "") == "torch.nn.init":
            target = arguments[0] if arguments else options.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return function(*arguments, **options)


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"), _Unfilled():
        return build()
