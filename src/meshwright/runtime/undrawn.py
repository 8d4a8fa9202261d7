"""Building a module whose parameters are read from files: the random numbers they would start with are not drawn.

    with undrawn():
        module = GPT(options)          parameters hold whatever was in memory; buffers are as always

Under `deferred` every rank draws for the whole model, so that its generator goes on as it would: of a large model that takes
longer than reading it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

DRAWING = frozenset(
    (
        "normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_",
        "orthogonal_", "sparse_",
    )
)  # fmt: skip
"""Functions that fill a tensor with random numbers: methods of tensors, and those of torch.nn.init."""


class undrawn(TorchFunctionMode):  # noqa: N801 (used as a function is)
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        target = arguments[0] if arguments else options.get("tensor")
        if getattr(function, "__name__", "") in DRAWING and isinstance(target, nn.Parameter):
            return target
        return function(*arguments, **options)
