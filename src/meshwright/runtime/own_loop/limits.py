"""What an own loop may not do after `wrap`, refused by name where it is done.

a second optimizer      holds tensors that are no longer those that are trained
torch.autograd.grad     of parameters: hands out a rank's gradient before ranks add gradients up
a second backward       of one forward: replicas average gradients once a forward
requires_grad changed   replicas wait for the gradients of those that were trained at first
copy.deepcopy           of the model: its parts belong to groups of ranks, which cannot be copied
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.runtime.own_backward import what_replaces_parameters


def check_holds_all(module: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    """To be called before anything is changed. An optimizer of another model's parameters is refused where it is taken apart."""
    reason = what_replaces_parameters(plan)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held <= {id(parameter) for parameter in module.parameters()}:
        return
    for name, parameter in module.named_parameters():
        if reason and parameter.requires_grad and id(parameter) not in held:
            raise PlanError(
                f"parameter '{name}' has requires_grad=True, and the optimizer that wrap was given does not hold it. Under "
                f"{reason} another tensor is trained in its place, which an optimizer of its own would not update: give wrap one "
                "optimizer for all parameters (in groups with settings of their own), or freeze it with requires_grad_(False)"
            )


def refuse_copies(module: nn.Module) -> None:
    def refuse(memo: Any) -> NoReturn:
        raise PlanError(
            "a model of wrap cannot be copied: its tensors belong to groups of ranks. Copy the model before wrap and wrap the copy "
            "with an optimizer of its own, or keep averages of model.parameters(), which this rank updates"
        )

    vars(module)["__deepcopy__"] = refuse


class HandedOut:
    """Parameters whose gradient a backward computed without leaving it on them: `torch.autograd.grad` was asked for it."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[str, None] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._computed, name))
                parameter.register_post_accumulate_grad_hook(partial(self._left, name))

    def _computed(self, name: str, gradient: Tensor) -> None:
        self.names[name] = None

    def _left(self, name: str, parameter: Tensor) -> None:
        self.names.pop(name, None)

    def check(self) -> None:
        """At the end of a backward."""
        names = list(self.names)
        self.names.clear()
        if names:
            raise PlanError(
                f"torch.autograd.grad with respect to parameter '{names[0]}' gives this rank's gradient, which ranks have not "
                "added up: call loss.backward() and read parameter.grad, or compute this inside the model's forward"
            )


class Replicas:
    """What DistributedDataParallel cannot do, and does not say in words that belong to the loop."""

    def __init__(self, module: nn.Module) -> None:
        self.is_used = isinstance(module, DistributedDataParallel)
        self._trained = _trained(module) if self.is_used else {}
        self._backwards = 0

    def before_forward(self, module: nn.Module) -> None:
        self._backwards = 0
        if not self.is_used:
            return
        now = _trained(module)
        for name in (*(self._trained.keys() - now.keys()), *(now.keys() - self._trained.keys())):
            raise PlanError(
                f"parameter '{name.removeprefix('module.')}' had requires_grad={name in self._trained} when the model was wrapped: "
                "replicas wait for the gradients of the parameters that were trained then. Freeze before wrap, set the learning "
                "rate of its group to 0, or use ZeRO 1 to 3"
            )

    def begin_backward(self) -> None:
        self._backwards += 1
        if self.is_used and self._backwards > 1:
            raise PlanError(
                "a second backward goes through one forward (retain_graph=True), and replicas average gradients once a forward: "
                "what it adds would stay this rank's own. Add the losses and call backward once, or run the forward again"
            )


def _trained(module: nn.Module) -> dict[str, None]:
    return {name: None for name, parameter in module.named_parameters() if parameter.requires_grad}
