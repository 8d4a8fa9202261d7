"""How one piece of a parameter is updated away from its device: by the compiled Adam, or by the user's own optimizer.

    optimizer                              rule
    Adam, AdamW over fp32, plain options   AdamRule: one pass over memory, 16-bit gradients read and parameters written in it
    any other                              TorchRule: a copy of the optimizer that holds this one piece

An optimizer that treats every entry by itself may be given any stretch of a parameter; any other is given it whole.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from meshwright.runtime.offload.kernel import AdamSettings, AdamWork, Kernel, adam_work, find_kernel

BY_ENTRY = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""torch's optimizers that treat every entry by itself."""
ADAM_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of Adam that the compiled update does not have."""

State = dict[str, Any]
"""What an optimizer keeps for a piece, by torch's names."""


class Task(NamedTuple):
    """One update."""

    master: Tensor
    state: State
    gradient: Tensor
    """As it arrived."""
    narrow: Tensor | None
    """Where the new parameter is also written, in the device's dtype."""
    group: State
    scale: float
    """What the gradient is multiplied with."""


class Rule(ABC):
    @abstractmethod
    def update(self, tasks: list[Task]) -> None: ...

    @abstractmethod
    def accumulate(self, total: Tensor, gradient: Tensor, is_first: bool) -> None:
        """total += gradient."""


class AdamRule(Rule):
    def __init__(self, kernel: Kernel, decoupled: bool, num_threads: int) -> None:
        self.kernel, self.decoupled, self.num_threads = kernel, decoupled, num_threads

    def update(self, tasks: list[Task]) -> None:
        self.kernel.adam([self._work(task) for task in tasks], self.num_threads)

    def _work(self, task: Task) -> AdamWork:
        state = task.state
        state["step"] += 1
        step = int(state["step"])
        settings = adam_settings(task.group, step, self.decoupled, task.scale)
        return adam_work(task.master, state["exp_avg"], state["exp_avg_sq"], task.gradient, task.narrow, settings, step)

    def accumulate(self, total: Tensor, gradient: Tensor, is_first: bool) -> None:
        self.kernel.accumulate(total, gradient, is_first, self.num_threads)


def adam_settings(group: State, step: int, decoupled: bool, scale: float) -> AdamSettings:
    rate, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    return AdamSettings(
        rate_decay=1 - rate * decay,
        decay=decay,
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        step_size=-rate / (1 - beta1**step),
        root2=math.sqrt(1 - beta2**step),
        eps=group["eps"],
        scale=scale,
        decoupled=decoupled or decay == 0,
        near=1 - beta1 < 0.5,
    )


class TorchRule(Rule):
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def update(self, tasks: list[Task]) -> None:
        for task in tasks:
            self._update(task)

    def _update(self, task: Task) -> None:
        weight = nn.Parameter(task.master)
        wide = task.gradient.to(task.master.dtype)
        weight.grad = wide if task.scale == 1 else wide * task.scale
        own = copy.copy(self.optimizer)  # its class, its hooks and settings; groups and state of this piece alone
        own.param_groups = [{**task.group, "params": [weight]}]
        own.state = defaultdict(dict, {weight: task.state} if task.state else {})
        type(own).step(own)
        task.state.update(own.state[weight])
        if task.narrow is not None:
            task.narrow.copy_(task.master)

    def accumulate(self, total: Tensor, gradient: Tensor, is_first: bool) -> None:
        if is_first:
            total.copy_(gradient)
        else:
            total.add_(gradient)


def find_rule(optimizer: Optimizer, dtype: torch.dtype, num_threads: int) -> Rule:
    """dtype: of the master weights."""
    kernel = find_kernel() if is_plain_adam(optimizer) and dtype == torch.float32 else None
    if kernel is None:
        return TorchRule(optimizer)
    return AdamRule(kernel, type(optimizer) is AdamW, num_threads)


def is_plain_adam(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    decoupled = type(optimizer) is AdamW
    return type(optimizer) in (Adam, AdamW) and not any(
        group.get(option) or (group.get("decoupled_weight_decay", False) and not decoupled)
        for group in groups
        for option in ADAM_OPTIONS
    )


def is_by_entry(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ in BY_ENTRY and type(optimizer).__module__.startswith("torch.optim")
