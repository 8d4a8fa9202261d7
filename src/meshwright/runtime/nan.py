"""Which block made the first value that is not finite: NaN or infinity.

Hooks on every module look at what goes in and what comes out:

    forward     a module whose inputs are finite and whose output is not made it; of nested ones, the innermost
    backward    gradients come in at a module's outputs and leave at its inputs: the innermost module whose input gets a
                gradient that is not finite, when no gradient before it was, made it
    neither     a parameter's gradient alone (looked at before the update), a parameter already, the loss, or the batch

A look waits for the device, so all of this is only there on request. Ranks compare what they found: the earliest counts.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.codec import Value
from meshwright.core.errors import PlanError, RunError
from meshwright.core.plan import Plan
from meshwright.models.objective import Batch
from meshwright.runtime._torch import DisableTorchFunction, tree_leaves
from meshwright.runtime.clip import local
from meshwright.runtime.messages.exchange import all_ranks


class Finding(Value, kw_only=True):
    """The first place where a value was not finite, as one rank saw it."""

    rank: int
    step: int
    seconds: float
    """When; ranks are compared by it."""
    where: str
    """In words: `forward of block 'blocks.2.mlp'`."""

    @property
    def words(self) -> str:
        return f"first in {self.where}, at step {self.step} on rank {self.rank}"


class NanFinder:
    """Watches one module. `begin` opens a step, `earliest` asks all ranks what they found."""

    def __init__(self, module: nn.Module, plan: Plan, rank: int) -> None:
        if plan.compile:
            raise PlanError("find_nan looks at modules one by one, and compiled blocks have none: leave compile out")
        self.module, self.rank = module, rank
        self.step = 0
        self.found: Finding | None = None
        self._of: nn.Module | None = None
        self._scaled = plan.precision == "fp16"
        self._names = {part: name for name, part in module.named_modules()}
        for part in self._names:
            part.register_forward_pre_hook(self._before, with_kwargs=True)
            part.register_forward_hook(self._after, with_kwargs=True)

    def begin(self, step: int, batch: Batch) -> None:
        """Gradients that overflow under a loss scale are what the scale is found by: those of earlier steps do not count."""
        self.step = step
        if self._scaled:
            self.found = None
        if not is_finite(batch):
            self._note("the batch itself")

    def before_update(self, *_: Any) -> None:
        for name, parameter in self.module.named_parameters():
            if not is_finite(parameter.grad):
                self._note(f"the gradient of parameter '{name}'")
                return

    def earliest(self) -> Finding | None:
        """The first of all ranks; every rank must ask."""
        found = [one for one in all_ranks(self.found, Finding | None) if one is not None]
        return min(found, key=lambda one: (one.step, one.seconds), default=None)

    def _before(self, part: nn.Module, arguments: Any, options: Any) -> None:
        for parameter_name, parameter in part.named_parameters(recurse=False):
            if not is_finite(parameter):
                self._note(f"parameter '{self._join(part, parameter_name)}', before forward")
        for leaf in tree_leaves((arguments, options)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self._see_gradient(part, gradient))

    def _after(self, part: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        if not is_finite(output):
            came_in = "" if is_finite((arguments, options)) else ", which was given values that are not finite"
            self._note(f"forward of {self._called(part)}{came_in}")
        if part is self.module:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._see_gradient_of_loss)

    def _see_gradient(self, part: nn.Module, gradient: Tensor) -> None:
        if is_finite(gradient):
            return
        inside = self._of is not None and self._names[part].startswith(self._names[self._of])
        if self.found is None or inside:  # of the modules that share an input the innermost is asked last
            self.found, self._of = None, part
            self._note(f"backward of {self._called(part)}")
        else:
            self._of = None

    def _see_gradient_of_loss(self, gradient: Tensor) -> None:
        if not is_finite(gradient):
            self._note("backward of the loss")

    def _note(self, where: str) -> None:
        if self.found is None:
            self.found = Finding(rank=self.rank, step=self.step, seconds=time.time(), where=where)

    def _called(self, part: nn.Module) -> str:
        kind = type(part).__name__.removeprefix("FSDP")
        return f"block '{self._names[part]}' ({kind})" if self._names[part] else f"the model itself ({kind})"

    def _join(self, part: nn.Module, name: str) -> str:
        return f"{self._names[part]}.{name}" if self._names[part] else name


def not_finite(loss: float, step: int, found: Finding | None) -> RunError:
    """The error of a run whose loss is no number, the same on all ranks."""
    where = found.words if found else "no module made it: it is made by the loss"
    return RunError(f"the loss is {loss} at step {step}: {where}")


def is_finite(values: Any) -> bool:
    """Whether all floating numbers in a nest of tensors are finite; what one rank has of them."""
    with torch.no_grad(), DisableTorchFunction():
        return all(
            bool(local(leaf).isfinite().all())
            for leaf in tree_leaves(values)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()
        )
