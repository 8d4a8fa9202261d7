"""Any torch optimizer, kept across the moment when a module's parameters become shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

LOOK_AT_WHOLE_TENSORS = ("LBFGS", "Adafactor", "Muon", "Lamb", "LARS", "Shampoo", "DistributedShampoo", "SOAP")
"""Classes, torch's and others', whose update of an entry depends on the rest of its tensor: on a part it would be another."""


def check_optimizer(optimizer: Optimizer | OptimizerFactory, plan: Plan) -> None:
    """Where ranks hold plain parts of tensors, an optimizer must treat every entry by itself. A factory that hides its class is
    asked again by what it makes."""
    cutting = ("tp", "ep", "dp") if plan.offload.what == "parameters" else ("tp", "ep")
    axes = [f"{axis}={degree}" for axis in cutting if (degree := getattr(plan.mesh, axis)) > 1]
    kind = _class_of(optimizer)
    if plan.zero and any(one.__name__ == "LBFGS" for one in kind.__mro__):
        axes.append(f"ZeRO {plan.zero}")
    found = next((one.__name__ for one in kind.__mro__ if one.__name__ in LOOK_AT_WHOLE_TENSORS), None)
    if axes and found is not None:
        raise PlanError(
            f"{found} looks at whole tensors, but with {' and '.join(axes)} a rank holds parts of them: use an optimizer that "
            "treats every entry by itself (AdamW, SGD), or a plan without these axes"
        )


def _class_of(optimizer: Optimizer | OptimizerFactory) -> type:
    bare = optimizer
    while isinstance(bare, partial):
        bare = bare.func
    return bare if isinstance(bare, type) else type(bare)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def make_optimizer(
    optimizer: Optimizer | OptimizerFactory, module: nn.Module, before: dict[str, nn.Parameter]
) -> Optimizer:
    """An optimizer over the module's parameters as they are now.

    A factory is called with the trainable ones. An optimizer made before keeps its groups and settings, and is given the
    new parameters in place of the old.
    """
    if isinstance(optimizer, Optimizer):
        return rebind(optimizer, before, named_parameters(module))
    return optimizer([parameter for parameter in module.parameters() if parameter.requires_grad])


def rebind(optimizer: Optimizer, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> Optimizer:
    """Replace each old parameter in the optimizer's groups by the new one of the same name.

    None takes its place where another stage holds it, several where stages of this rank have copies of it.
    """
    replacement: dict[int, list[nn.Parameter]] = {id(old): [] for old in before.values()}
    for name, old in before.items():
        if name in after and not any(after[name] is new for new in replacement[id(old)]):
            replacement[id(old)].append(after[name])
    if any(before[name] is not after.get(name) for name in before):
        _move_fresh_state(optimizer, replacement)
    for group in optimizer.param_groups:
        group["params"] = [new for parameter in group["params"] for new in _replaced(parameter, replacement)]
    return optimizer


def _move_fresh_state(optimizer: Optimizer, replacement: dict[int, list[nn.Parameter]]) -> None:
    """Some optimizers (Adagrad) make their state when they are made: constants, that the new parameters get too."""
    for old, state in list(optimizer.state.items()):
        del optimizer.state[old]
        for new in _replaced(old, replacement):
            optimizer.state[new] = {name: _moved(name, item, old, new) for name, item in state.items()}


def _moved(name: str, item: Any, old: Tensor, new: Tensor) -> Any:
    if isinstance(item, Tensor) and item.shape == old.shape and item.numel():
        if item.min() != item.max():
            raise _stepped()
        return torch.full_like(new, item.flatten()[0].item())
    if name == "step" and float(item) != 0:
        raise _stepped()
    return item.clone() if isinstance(item, Tensor) else item


def _stepped() -> PlanError:
    return PlanError("the optimizer has already stepped: apply or wrap the plan before the first optimizer.step()")


def _replaced(parameter: Tensor, replacement: dict[int, list[nn.Parameter]]) -> list[nn.Parameter]:
    if id(parameter) not in replacement:
        raise PlanError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's: "
            "make the optimizer from this model's parameters"
        )
    return replacement[id(parameter)]


def state_tensors(optimizer: Optimizer) -> Iterable[Any]:
    """Every tensor of the optimizer's state."""
    return (item for state in optimizer.state.values() for item in state.values() if isinstance(item, Tensor))
