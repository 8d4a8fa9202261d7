"""Which parameters the backward passes of a step reach, on any rank.

A forward may leave parameters out: a layer that nothing calls, an expert that no sample of this rank chooses. Ranks that reduce
gradients must reduce the same ones, so those count as zeros there (runtime/reach.py for replicas, `fully_shard`'s own option for
shards). One process gives a parameter that no sample uses no gradient, and its optimizer skips it, moments and weight decay too. So
what no rank has used is dropped before the update. Ranks agree on that once a step for as long as one of them leaves something out;
where the first step used everything everywhere, they never ask again, and a parameter that no rank uses in a later step has a
gradient of zeros there.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from meshwright.runtime.messages.exchange import all_ranks

USAGE = "_meshwright_usage"


class Usage:
    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """group: the ranks that reduce the module's gradients among them."""
        self.group = group
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.used: set[int] = set()
        self.is_over = False
        self._watched: dict[int, tuple[Tensor, Any]] = {}

    def watch(self, parameter: Tensor, gathered: Tensor | None = None) -> None:
        """gathered: the tensor that backward reaches in the place of a shard."""
        reached = parameter if gathered is None else gathered
        number = self.numbers.get(id(parameter))
        if number is None or self.is_over or id(reached) in self._watched:
            return

        def see(gradient: Tensor | None) -> None:
            if gradient is not None:
                self.used.add(number)

        self._watched[id(reached)] = (reached, reached.register_hook(see))

    def drop(self) -> None:
        """Take away the gradients of what no rank has used since the last time. Every rank of the group calls it."""
        if self.is_over:
            return
        left_out = set(range(len(self.parameters))) - self.used
        everywhere = all_ranks(left_out, set[int], self.group)
        for number in set.intersection(*everywhere):
            self.parameters[number].grad = None
        self.used.clear()
        if not any(everywhere):
            self.is_over = True
            for _, handle in self._watched.values():
                handle.remove()
            self._watched.clear()


def watch_usage(module: nn.Module, group: dist.ProcessGroup) -> Usage | None:
    """Of a module whose gradients the group reduces; None for a single rank."""
    if group.size() == 1:
        return None
    usage = vars(module)[USAGE] = Usage(module, group)
    for parameter in usage.parameters:
        usage.watch(parameter)
    return usage


def drop_unused(module: nn.Module) -> None:
    """Before an update, when gradients are reduced."""
    usage: Usage | None = vars(module).get(USAGE)
    if usage is not None:
        usage.drop()
