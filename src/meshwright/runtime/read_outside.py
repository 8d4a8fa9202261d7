"""Sharded parameters that a model's own code reads where they are not gathered: outside of the block that they belong to.

`fully_shard` gathers the parameters of a block when the block is called. Code outside of it (a penalty on all weights, a call of
one of its parts) meets a shard with its gradient: what it computes of that is no number of one process. Where nothing is to be
trained through it, as when a teacher follows its student, each rank works on its shards.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import ModelError
from meshwright.runtime._torch import tree_leaves

OWN_FILES = ("/torch/distributed/", "/meshwright/runtime/")
"""Whose code handles shards as such."""
PASSING = ("__torch_function__", "outside")
"""Functions of other modes, through which a call passes."""


def read_outside(name: str, how: str = "") -> ModelError:
    return ModelError(
        f"parameter '{name}' is read{how} outside of its block, where ZeRO holds a shard of it: compute that inside the block and "
        "return it, or use ZeRO 0"
    )


class ReadOutside(TorchFunctionMode):
    """While a forward runs: a function that is given a trained shard is refused, with the parameter's name."""

    def __init__(self, names: dict[int, str]) -> None:
        """names: of the shards, by identity."""
        super().__init__()
        self.names = names

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled() and getattr(function, "__name__", "") != "__get__" and _is_users():
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, DTensor) and leaf.requires_grad and id(leaf) in self.names:
                    raise read_outside(self.names[id(leaf)], f" ('{getattr(function, '__name__', function)}')")
        return function(*args, **(kwargs or {}))


def _is_users() -> bool:
    """Whether a model's code made the call, itself or by a module of torch's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in PASSING:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not any(folder in frame.f_code.co_filename for folder in OWN_FILES)
