"""Building a module without memory.

on meta           parameters have shapes only, and drawing nothing takes no time                             -> build_on_meta
with memory       where the constructor reads values, or the module keeps something of `meta` that its forward then meets:
                  plain numbers of a table in a list, a device in an object                              -> build_followable
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.models.faked.counted import TooManyModulesError, counted_bytes, counted_modules

_FILLING = ("normal_", "uniform_", "zero_", "fill_", "trunc_normal_", "copy_")
MOST_OF_MEMORY = 0.25
"""A module larger than this share of the host's memory is not built only to be looked at."""


class NoValueError(RuntimeError):
    """A constructor asks `meta` for what it does not have."""


class _Unfilled(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if getattr(function, "__name__", "") in _FILLING or getattr(function, "__module__", "") == "torch.nn.init":
            target = arguments[0] if arguments else options.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        try:
            return function(*arguments, **options)
        except (
            NotImplementedError
        ) as error:  # which torch's parametrizations take for another thing, and go on without a value
            raise NoValueError(str(error)) from error


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"), _Unfilled():
        return build()


def build_followable(build: Callable[[], nn.Module]) -> nn.Module:
    """Without memory where the constructor allows it. Its forward is followed as on a CPU: a device that it keeps is that."""
    try:
        with counted_modules():
            module = build_on_meta(build)
    except TooManyModulesError:
        raise
    except (
        Exception
    ) as error:  # `.item()` in a constructor, and whatever else has no value there; a true error comes again
        with counted_modules(), counted_bytes(most_bytes(), error):
            return build()
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.device) and value.type == "meta":
                vars(part)[name] = torch.device("cpu")
    return module


def can_be_built(module: nn.Module) -> bool:
    """Whether a module that has no memory may be given some."""
    if not any(parameter.is_meta for parameter in module.parameters()):
        return False
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    return num_bytes <= most_bytes()


def most_bytes() -> int:
    """Of a module that is built only to be looked at."""
    return int(MOST_OF_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
