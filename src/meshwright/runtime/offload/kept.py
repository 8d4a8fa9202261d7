"""A parameter whose optimizer state stays on the device while that of others is on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.runtime.clip import local
from meshwright.runtime.offload.rules import Rule, State, Task


@dataclass(eq=False)
class Kept:
    name: str
    block: str
    parameter: nn.Parameter
    group: State
    master: Tensor | None
    """fp32 values of a parameter that the device computes with in 16 bits."""
    state: State = field(default_factory=dict)
    was_sent: bool = False
    has_sum: bool = False
    total: Tensor | None = None
    """Sum of the gradients of the microbatches so far."""
    gradient: Tensor | None = None
    """Of all of them, while its update has to wait: for others of its block, or for the norm."""

    def add(self, gradient: Tensor) -> None:
        """The gradient of a microbatch that is not the last."""
        wide = gradient.to(self.weight.dtype)
        self.total = wide if self.total is None else self.total.add_(wide)

    def whole(self, gradient: Tensor) -> Tensor:
        """With the last one, the gradient of the step."""
        total, self.total = self.total, None
        return gradient if total is None else total.add_(gradient)

    @property
    def weight(self) -> Tensor:
        return local(self.parameter.detach()) if self.master is None else self.master

    def task(self, scale: float) -> Task:
        assert self.gradient is not None
        narrow = None if self.master is None else local(self.parameter.detach())
        return Task(self.weight, self.state, self.gradient, narrow, self.group, scale)


@torch.no_grad()
def update_kept(ready: list[Kept], rule: Rule, scale: float) -> None:
    """Those that have a gradient, which goes."""
    rule.update([one.task(scale) for one in ready])
    for one in ready:
        one.gradient = None
