"""What a user writes into backward: hooks on parameters, functions with a backward of their own, second derivatives.

A hook is written for the gradient of the whole parameter, made once a step. Where a parameter is cut, sharded, held by one stage
or updated elsewhere, the tensor it was registered on is not the one that is trained: such plans are refused by name. Replicas
keep the user's own tensors, and run the hook on each rank's gradient before it is averaged, as DistributedDataParallel does.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.core.axes import MODEL_AXES
from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.runtime._torch import gradient_hooks


def check_hooks(module: nn.Module, plan: Plan) -> None:
    """To be called before anything is changed."""
    reason = what_replaces_parameters(plan)
    if not reason:
        return
    for name, parameter in module.named_parameters():
        for hook in gradient_hooks(parameter):
            raise PlanError(
                f"{place_of(hook)} is registered on parameter '{name}', and {reason} trains another tensor in its place, on which "
                "the hook would not run, or only on a part: use dp with zero 0, or change the gradient of an activation instead"
            )


def what_replaces_parameters(plan: Plan) -> str:
    """The part of the plan under which the user's own tensors are not those that are trained."""
    axes = [f"{axis}={degree}" for axis, degree in plan.mesh.used.items() if axis in MODEL_AXES]
    if axes:
        return axes[0]
    if plan.zero:
        return f"ZeRO {plan.zero}"
    return "" if plan.offload.what == "none" else f"offload of the {plan.offload.what}"


def refuse_second_derivative(what: str) -> None:
    """To be called in a backward that cannot be differentiated itself: there gradients are on only for a second derivative."""
    if torch.is_grad_enabled():
        raise PlanError(f"a second derivative (create_graph=True) goes through {what}, which has none: leave that out")


def place_of(function: Any) -> str:
    """`the hook '<lambda>' (model.py, line 12)`; of an autograd function, `the function 'Act' (…)`."""
    kind = "the function" if inspect.isclass(function) else "the hook"
    try:
        where = f" ({Path(inspect.getfile(function)).name}, line {inspect.getsourcelines(function)[1]})"
    except (OSError, TypeError):
        where = ""
    return f"{kind} '{getattr(function, '__qualname__', type(function).__qualname__)}'{where}"
