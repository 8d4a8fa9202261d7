"""Whether gradients add up over parts of a batch and follow the scale of the loss, as plans that cut the batch take them to.

    microbatches      g(A ∪ B) = g(wₐ · loss(A)) + g(wᵦ · loss(B))       w: the part's share of what is counted
    dp                g(2 · loss) = 2 · g(loss)                          replicas average gradients of their own means

Autograd's own gradients do. A backward that a user wrote need not: a hook or a function that clips, normalises or rounds what it
is given sees the gradient of one microbatch, at that rank's scale, where one process sees that of the whole batch. Such a model
is refused for plans that cut the batch, with the functions and hooks that it meets. A backward that writes `parameter.grad` itself
(fused accumulation) writes to the tensor it was given, which is a gathered copy under most plans: nobody adds that up over ranks.
Asked when a comparison has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.core.result import describe
from meshwright.measure.exact import exact, widened_batch
from meshwright.measure.mean_loss import cuts_batch
from meshwright.measure.silence import silence
from meshwright.models.objective import Batch, Objective, call, num_samples, slice_batch
from meshwright.runtime._torch import gradient_hooks
from meshwright.runtime.own_backward import place_of
from meshwright.runtime.split.functions import functions_met

TOLERANCE = 1e-8
"""Of float64 sums in another order, relative to the largest gradient."""
Gradients = dict[str, Tensor]


def refuse_own_gradient(build: Callable[[], nn.Module], batch: Batch, objective: Objective, plan: Plan) -> None:
    """build: gives the same small module at every call."""
    _refuse_written(build(), batch, objective, plan)
    if not cuts_batch(plan):
        return
    module = build()
    names = {place_of(hook) for parameter in module.parameters() for hook in gradient_hooks(parameter)}
    with functions_met(names), _Hooks(names):
        whole = _gradients(module, [batch], objective)
    half = num_samples(batch) // 2
    parts = _gradients(build(), [slice_batch(batch, 0, half), slice_batch(batch, half, num_samples(batch))], objective)
    first = _first_difference(whole, parts)
    if first is not None:
        raise PlanError(_words("is not the sum of its parts'", first, names, plan))
    doubled = _gradients(build(), [batch], objective, scale=2.0)
    first = _first_difference({name: 2 * gradient for name, gradient in whole.items()}, doubled)
    if first is not None and plan.mesh.dp > 1:
        raise PlanError(_words("does not double with the loss, so that ranks' averages differ,", first, names, plan))


def _refuse_written(module: nn.Module, batch: Batch, objective: Objective, plan: Plan) -> None:
    """`torch.autograd.grad` hands gradients to its caller: what then stands on a parameter, a backward of the model's wrote."""
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    names: set[str] = set()
    with exact(), silence(None), functions_met(names):
        moved = widened_batch(batch)
        torch.autograd.grad(objective.loss(call(module, moved), moved), list(trained.values()), allow_unused=True)
    written = [name for name, one in trained.items() if one.grad is not None]
    if written:
        met = ", ".join(sorted(names)) or "none"
        raise PlanError(
            f"a backward writes the gradient of parameter '{written[0]}' itself (functions met: {met}), "
            f"and under {describe(plan)} that is a copy, or a part, of the tensor that is trained: what is written there is lost. "
            "Return the gradient from backward, or use dp with zero 0 and a plan without tp, cp and ep"
        )


def _gradients(module: nn.Module, parts: list[Batch], objective: Objective, scale: float = 1.0) -> Gradients:
    """Of all parts together, each weighted by what it counts before its backward."""
    total = sum(objective.count(part) for part in parts)
    with exact(), silence(None):
        for part in parts:
            moved = widened_batch(part)
            loss = objective.loss(call(module, moved), moved)
            (loss * (scale * objective.count(part) / total)).backward()
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def _first_difference(one: Gradients, other: Gradients) -> str | None:
    largest = max((float(gradient.abs().max()) for gradient in one.values() if gradient.numel()), default=0.0)
    for name, gradient in one.items():
        if name not in other or not float((gradient - other[name]).abs().max()) <= TOLERANCE * largest:
            return name
    return None


def _words(what: str, first: str, names: set[str], plan: Plan) -> str:
    culprits = f"; its backward is changed by {', '.join(sorted(names))}" if names else ""
    return (
        f"the gradient of a batch {what} first for '{first}'{culprits}. The plan cuts the batch (dp={plan.mesh.dp}, "
        f"{plan.num_microbatches} microbatches), and what reads a gradient there would see a part of it: use dp=1 and "
        f"microbatch={plan.global_batch}, or make that work a linear one"
    )


class _Hooks(TorchFunctionMode):
    """Notes what is registered on tensors to change their gradients."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.register_hook:
            self.names.add(place_of(args[1]))
        return function(*args, **(kwargs or {}))
