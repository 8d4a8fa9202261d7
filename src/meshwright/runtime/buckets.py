"""Buckets: gradients that only some of the dp ranks share, averaged over them while backward goes on.

Replicas of the whole module reduce theirs by themselves (DistributedDataParallel); experts that lie over ep are left out there
and reduced here, over the ranks that hold the same ones. Buckets are filled from the last parameter to the first: about the
order in which gradients become ready. A bucket is sent when it and all before it are full, so that ranks call alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.rules.groups import fill_buckets

NOTE = "_meshwright_buckets"


class Buckets:
    """Hooks on parameters. Nothing is sent in a microbatch that is not the last of its step."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group = group
        self.is_last = True
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = fill_buckets(trained[::-1], lambda one: one.numel() * one.element_size())
        self.ready: set[int] = set()
        self.sent: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        if not self.is_last:
            return
        self.ready.add(id(parameter))
        while len(self.sent) < len(self.buckets) and self._is_full(self.buckets[len(self.sent)]):
            self._send([one for one in self.buckets[len(self.sent)] if one.grad is not None])
        if len(self.sent) == len(self.buckets):
            self._finish()

    def _is_full(self, bucket: list[nn.Parameter]) -> bool:
        return all(id(parameter) in self.ready or not parameter.requires_grad for parameter in bucket)

    def _send(self, members: list[nn.Parameter]) -> None:
        flat = torch.cat([one.grad.flatten() for one in members if one.grad is not None])
        self.sent.append((members, flat, dist.all_reduce(flat, group=self.group, async_op=True)))

    def _finish(self) -> None:
        for members, flat, work in self.sent:
            work.wait()
            flat.div_(self.group.size())
            for parameter, part in zip(members, flat.split([one.numel() for one in members]), strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(part.view_as(parameter.grad))
        self.ready.clear()
        self.sent.clear()


def reduce_in_buckets(module: nn.Module, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Noted on the module, so that `set_last` finds them."""
    vars(module)[NOTE] = Buckets(parameters, group)


def set_last(module: nn.Module, is_last: bool) -> None:
    """Say before a microbatch whether it is the last of its step."""
    buckets: Buckets | None = vars(module).get(NOTE)
    if buckets is not None:
        buckets.is_last = is_last
