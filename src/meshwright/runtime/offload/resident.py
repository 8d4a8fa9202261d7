"""What stays on the device beside streamed blocks: embeddings, the last norm, the head.

The optimizer updates them there. Where the device computes in 16 bits they have a working copy, which stands in their place while
something runs, and whose gradients add up in the dtype that is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.runtime.offload.optimizer_part import part_of, step_of_class


class Resident:
    def __init__(self, module: nn.Module, streamed: set[int], working: torch.dtype) -> None:
        """streamed: ids of the parameters that are not kept."""
        self.places: list[tuple[nn.Module, str, nn.Parameter]] = [
            (part, leaf, parameter)
            for part in module.modules()
            for leaf, parameter in part._parameters.items()
            if parameter is not None and id(parameter) not in streamed
        ]
        self.parameters = list({id(one): one for _, _, one in self.places}.values())
        self._working = {id(one): self._copy(one, working) for one in self.parameters}

    @property
    def num_bytes(self) -> int:
        """On the device, without gradients and what the optimizer keeps."""
        copies = [self._working[id(one)] for one in self.parameters if self._working[id(one)] is not one]
        return sum(one.numel() * one.element_size() for one in (*self.parameters, *copies))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the working copies."""
        for owner, leaf, parameter in self.places:
            owner._parameters[leaf] = self._working[id(parameter)]
        try:
            yield
        finally:
            for owner, leaf, parameter in self.places:
                owner._parameters[leaf] = parameter

    def average(self, group: dist.ProcessGroup | None) -> None:
        """Gradients over the dp ranks: of every parameter that one of them has one for."""
        if group is None or not self.parameters:
            return
        has = torch.tensor([one.grad is not None for one in self.parameters], dtype=torch.int32)
        has = has.to(self.parameters[0].device)
        dist.all_reduce(has, group=group)
        for parameter, count in zip(self.parameters, has.tolist(), strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad.div_(group.size())

    def update(self, optimizer: Optimizer) -> None:
        step_of_class(part_of(optimizer, self.parameters))
        for parameter in self.parameters:
            parameter.grad = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        for parameter in self.parameters:
            copy = self._working[id(parameter)]
            if copy is not parameter:
                copy.copy_(parameter)

    def _copy(self, parameter: nn.Parameter, working: torch.dtype) -> nn.Parameter:
        if parameter.dtype == working or not parameter.is_floating_point():
            return parameter
        copy = nn.Parameter(parameter.detach().to(working), parameter.requires_grad)
        if copy.requires_grad:
            copy.register_post_accumulate_grad_hook(lambda one: _hand_over(one, parameter))
        return copy


def _hand_over(copy: Tensor, parameter: nn.Parameter) -> None:
    assert copy.grad is not None
    gradient, copy.grad = copy.grad.to(parameter.dtype), None
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
