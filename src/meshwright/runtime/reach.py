"""Replicas reduce a bucket of gradients when each of its parameters has reported. A parameter that a rank's forward did not use
never would, and the other ranks would wait for it: `reach` ties every parameter to the loss by an edge that carries nothing, so
that all report, and one without a gradient counts as zeros. That is what one process does with samples that do not use it.

One process leaves a parameter that *no* sample uses without a gradient, and its optimizer skips it: see runtime/usage.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.runtime._torch import tree_flatten, tree_unflatten


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient, *([None] * ctx.num_parameters))


def reach(values: Any, module: nn.Module) -> Any:
    """The same nest of values; a backward from any of its tensors reaches every parameter of the replicas."""
    if not isinstance(module, DistributedDataParallel) or not torch.is_grad_enabled():
        return values
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    leaves, form = tree_flatten(values)
    tie: Callable[..., Tensor] = _Tie.apply
    tied = [tie(leaf, *parameters) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
    return tree_unflatten(tied, form)
