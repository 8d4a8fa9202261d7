"""Replicas reduce a bucket of gradients when each of its parameters has reported. A parameter that a rank's forward did not use
never would, and the other ranks would wait for it: `reach` ties every parameter to the loss by an edge that carries nothing, so
that all report, and one without a gradient counts as zeros. That is what one process does with samples that do not use it.

One process leaves a parameter that *no* sample uses without a gradient, and its optimizer skips it. Which those are is found in the
first step (`Usage`). Later, a parameter that no rank uses in some step has a gradient of zeros there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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


class Usage:
    """Which parameters of replicas some backward reaches, until it is asked."""

    def __init__(self, module: nn.Module) -> None:
        self.used: set[str] = set()
        self.names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._handles = [
            parameter.register_hook(self._seer(name))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def unused(self, group: dist.ProcessGroup) -> list[str]:
        """Those that no rank of the group has used; every rank asks once."""
        for handle in self._handles:
            handle.remove()
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, self.used, group=group)
        return [name for name in self.names if not any(name in used for used in answers)]

    def _seer(self, name: str) -> Any:
        def see(gradient: Tensor | None) -> None:
            if gradient is not None:
                self.used.add(name)

        return see
