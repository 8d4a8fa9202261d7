"""A Gate before the update: a step whose loss is judged bad, or whose gradients are not finite, changes nothing.

The ranks decide together, one number over all of them. It makes the device wait for the step's loss: only who asks pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from meshwright.runtime.clip import local

Judge = Callable[[float], bool]
"""Whether a loss of the global batch is good enough to learn from; the same answer on ranks that see the same loss."""


class Gate:
    def __init__(self, judge: Judge, looks_at_gradients: bool) -> None:
        """looks_at_gradients: not under fp16, where infinite ones are a matter of the loss scale."""
        self.judge, self.looks_at_gradients = judge, looks_at_gradients

    def opens(
        self, loss_sum: Tensor, count: Tensor, groups: Iterable[dist.ProcessGroup], parameters: Iterable[nn.Parameter]
    ) -> bool:
        """loss_sum: this rank's share of loss times tokens, to be added up along the groups; count: tokens of all."""
        total = loss_sum.detach().clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        is_good = self.judge(float(total / count.clamp(min=1))) and self._finite(parameters)
        bad = torch.tensor(float(not is_good), device=total.device)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return not bool(bad)

    def _finite(self, parameters: Iterable[nn.Parameter]) -> bool:
        if not self.looks_at_gradients:
            return True
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        return bool(torch.isfinite(get_total_norm(gradients, math.inf)))
