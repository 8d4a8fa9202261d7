"""Parameters that a model's own code reads where they are not whole, or not at hand: outside of the block that they belong to.

`fully_shard` gathers the parameters of a block when the block is called. Code outside of it (a penalty on all weights, a call of
one of its parts) meets a shard with its gradient: what it computes of that is no number of one process. Where nothing is to be
trained through it, as when a teacher follows its student, each rank works on its shards. Streamed parameters are on the device
while their block runs; outside of it code meets those of the host, whose gradients would reach nobody.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import ModelError
from meshwright.runtime._torch import tree_leaves

OWN_FILES = ("/torch/distributed/", "/meshwright/runtime/")
"""Whose code handles shards as such."""
WITHOUT_VALUES = frozenset(
    [
        "__get__",
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "stride",
        "element_size",
        "is_floating_point",
        "is_complex",
    ]
)
"""Functions that read no value."""
PASSING = ("__torch_function__", "outside")
"""Functions of other modes, through which a call passes."""


SHARDS = ("where ZeRO holds a shard of it", "use ZeRO 0")
STREAMED = ("where it is on the host", "keep parameters on the device (offload none or optimizer)")


def read_outside(name: str, how: str = "", why: tuple[str, str] = SHARDS) -> ModelError:
    """why: what is wrong there, and what else to do."""
    where, instead = why
    return ModelError(
        f"parameter '{name}' is read{how} outside of its block, {where}: compute that inside the block and return it, or {instead}"
    )


class ReadOutside(TorchFunctionMode):
    """While a forward runs: a function that is given one of these is refused, with the parameter's name."""

    def __init__(self, names: dict[int, str], why: tuple[str, str] = SHARDS) -> None:
        """names: of parameters, by identity."""
        super().__init__()
        self.names, self.why = names, why
        self._kept: list[Tensor] = []
        self._only_trained = why is SHARDS  # those of the host are on another device, and may lack rows

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks = torch.is_grad_enabled() or not self._only_trained
        if looks and getattr(function, "__name__", "") not in WITHOUT_VALUES and is_users():
            for leaf in tree_leaves((args, kwargs or {})):
                if id(leaf) in self.names and (leaf.requires_grad or not self._only_trained):
                    how = f" ('{getattr(function, '__name__', function)}')"
                    raise read_outside(self.names[id(leaf)], how, self.why)
        result = function(*args, **(kwargs or {}))
        own = args[0] if args and not self._only_trained else None
        if id(own) in self.names and isinstance(result, Tensor) and result is not own:
            self.names[id(result)] = self.names[id(own)]  # `.data` is the same memory
            self._kept.append(result)
        return result


def is_users() -> bool:
    """Whether a model's code made the call, itself or by a module of torch's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in PASSING:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not any(folder in frame.f_code.co_filename for folder in OWN_FILES)
