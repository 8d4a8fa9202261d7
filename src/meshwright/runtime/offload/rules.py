"""How one piece of a parameter is updated: by the compiled Adam, or by the user's own optimizer.

    optimizer                              rule
    Adam, AdamW over fp32, plain options   AdamRule: one pass over memory, 16-bit gradients read and parameters written in it;
                                           the same on a GPU: DeviceAdamRule (device_adam.py)
    any other                              TorchRule: a copy of the optimizer that holds this one piece

An optimizer that treats every entry by itself may be given any stretch of a parameter; any other is given it whole.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from meshwright.runtime._torch import foreach_copy
from meshwright.runtime.offload.kernel import AdamSettings, AdamWork, Kernel, adam_work, try_kernel

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


Wait = Callable[[], None]


class Rule(ABC):
    @abstractmethod
    def begin(self, tasks: list[Task]) -> Wait:
        """Begin updates, after those that were begun before. What it returns waits until they are done."""

    def update(self, tasks: list[Task]) -> None:
        self.begin(tasks)()

    def close(self) -> None:  # noqa: B027 - most rules hold nothing
        """No update comes afterwards."""

    @abstractmethod
    def accumulate(self, total: Tensor, gradient: Tensor, is_first: bool) -> None:
        """total += gradient."""


class AdamRule(Rule):
    def __init__(self, kernel: Kernel, decoupled: bool, num_threads: int) -> None:
        self.kernel, self.decoupled, self.num_threads = kernel, decoupled, num_threads
        self._queue = kernel.open_queue(num_threads)

    def begin(self, tasks: list[Task]) -> Wait:
        known: dict[tuple[int, int, float], AdamSettings] = {}
        number = self.kernel.hand(self._queue, [self._work(task, known) for task in tasks])
        return partial(self._wait, number, tasks)

    def _wait(self, number: int, _: list[Task]) -> None:
        """The memory of the tasks is held for so long."""
        self.kernel.wait(self._queue, number)

    def close(self) -> None:
        if self._queue:
            self.kernel.close_queue(self._queue)
        self._queue = 0

    def _work(self, task: Task, known: dict[tuple[int, int, float], AdamSettings]) -> AdamWork:
        """known: settings of the tasks before, by group, step and scale; most are the same."""
        state = task.state
        state["step"] += 1
        step = int(state["step"])
        key = (id(task.group), step, task.scale)
        if key not in known:
            known[key] = adam_settings(task.group, step, self.decoupled, task.scale)
        return adam_work(
            task.master, state["exp_avg"], state["exp_avg_sq"], task.gradient, task.narrow, known[key], step
        )

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

    def begin(self, tasks: list[Task]) -> Wait:
        """Ops of torch run where they are called; pieces with the same settings in one step."""
        for _, alike in groupby(tasks, key=lambda task: id(task.group)):
            self._update(list(alike))
        return _nothing

    def _update(self, tasks: list[Task]) -> None:
        weights = [nn.Parameter(task.master) for task in tasks]
        for weight, gradient in zip(weights, _wide_gradients(tasks), strict=True):
            weight.grad = gradient
        for task in tasks:
            _place_count(task)
        own = copy.copy(self.optimizer)  # its class, its hooks and settings; groups and state of these pieces alone
        own.param_groups = [{**tasks[0].group, "params": weights}]
        own.state = defaultdict(
            dict, {weight: task.state for weight, task in zip(weights, tasks, strict=True) if task.state}
        )
        type(own).step(own)
        for weight, task in zip(weights, tasks, strict=True):
            task.state.update(own.state[weight])
        narrow = [(task.narrow, task.master) for task in tasks if task.narrow is not None]
        if narrow:
            foreach_copy([new for new, _ in narrow], [master for _, master in narrow])

    def accumulate(self, total: Tensor, gradient: Tensor, is_first: bool) -> None:
        if is_first:
            total.copy_(gradient)
        else:
            total.add_(gradient)


def _wide_gradients(tasks: list[Task]) -> list[Tensor]:
    """In the masters' dtype, scaled."""
    gradients = [task.gradient for task in tasks]
    if any(task.gradient.dtype != task.master.dtype for task in tasks):
        wide = [torch.empty_like(task.master) for task in tasks]
        foreach_copy(wide, gradients)
        gradients = wide
    return [one if task.scale == 1 else one * task.scale for one, task in zip(gradients, tasks, strict=True)]


def _place_count(task: Task) -> None:
    """A count of steps that was loaded is on the host; torch's fused optimizers look for it on the device."""
    if "step" in task.state and (task.group.get("fused") or task.group.get("capturable")):
        task.state["step"] = task.state["step"].to(task.master.device)


def _nothing() -> None:
    """All is done."""


def find_rule(optimizer: Optimizer, dtype: torch.dtype, num_threads: int) -> Rule:
    """dtype: of the master weights."""
    kernel = try_kernel() if is_plain_adam(optimizer) and dtype == torch.float32 else None
    is_first = os.environ.get("RANK", "0") == "0"
    if isinstance(kernel, Kernel):
        if kernel.note and is_first:
            warnings.warn(kernel.note, RuntimeWarning, stacklevel=2)
        return AdamRule(kernel, type(optimizer) is AdamW, num_threads)
    if kernel is not None and is_first:
        warnings.warn(
            f"updates on the host run op by op, several times slower than compiled ones: {kernel}; install one, and see "
            "`meshwright doctor`",
            RuntimeWarning,
            stacklevel=2,
        )
    return TorchRule(optimizer)


def find_device_rule(optimizer: Optimizer, is_narrow: bool, device: torch.device) -> Rule:
    """For state that stays on the device. is_narrow: whether parameters there are in 16 bits, and their masters in fp32."""
    is_one_pass = is_narrow and is_plain_adam(optimizer)
    if not is_one_pass or device.type != "cuda" or find_spec("triton") is None:
        return TorchRule(optimizer)
    from meshwright.runtime.offload.device_adam import DeviceAdamRule

    return DeviceAdamRule(optimizer)


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
