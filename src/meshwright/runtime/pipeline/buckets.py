"""Buckets: the gradients of one stage's replicas, averaged over the ranks that hold the same once its last backward is done.

Buckets are as large as those of DistributedDataParallel (`rules/groups.py`), filled from the last parameter to the first. They
travel while the coordinate works on for its other stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.rules.groups import fill_buckets


class Buckets:
    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        """group: the ranks that hold the same parameters."""
        self.group = group
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad][::-1]
        self.degree = group.size() if self.parameters else 1
        self.used: list[nn.Parameter] | None = None
        self.under_way: list[tuple[Any, Tensor, list[nn.Parameter]]] = []

    def reduce(self) -> None:
        """Start to add up."""
        if self.degree == 1:
            return
        if self.used is None:
            self.used = self._used()
        for bucket in fill_buckets(self.used, lambda parameter: parameter.numel() * parameter.element_size()):
            flat = torch.cat([_gradient(parameter).flatten() for parameter in bucket])
            flat /= self.degree
            self.under_way.append((dist.all_reduce(flat, group=self.group, async_op=True), flat, bucket))

    def finish(self) -> None:
        for work, flat, bucket in self.under_way:
            work.wait()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        self.under_way.clear()

    def _used(self) -> list[nn.Parameter]:
        """Parameters that some rank has a gradient for; asked once. Others stay without, as in one process."""
        found = torch.tensor([float(p.grad is not None) for p in self.parameters], device=self.parameters[0].device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return [parameter for parameter, used in zip(self.parameters, found.tolist(), strict=True) if used]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
