"""The optimizer and learning rate of a run, from its settings."""

from __future__ import annotations

import inspect
from math import cos, pi
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.core.errors import InputError, nearest
from meshwright.core.recipe import Recipe
from meshwright.training.settings import LearningRateSettings, OptimizerSettings, Settings

SLOTS = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Rprop": 2, "Adadelta": 2, "ASGD": 1, "Adafactor": 1}
"""Tensors the size of a parameter an optimizer keeps for it; the Adam family keeps two."""
STEP_COUNT_BYTES = 4
"""Every optimizer but SGD counts its steps, tensor by tensor."""
FUSED = ("Adam", "AdamW")
"""Optimizers torch runs as one kernel over all parameters when asked to, sharded ones too."""


def make_optimizer(module: nn.Module, settings: Settings) -> Optimizer:
    """Two groups: matrices decay; vectors (biases, norms) do not, unless asked for."""
    chosen = settings.optimizer
    kind = _class(chosen.kind)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1 or chosen.decay_vectors]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1 and not chosen.decay_vectors]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, chosen.weight_decay), (vectors, 0.0))
        if members
    ]
    if not groups:
        raise InputError("the model has no trainable parameter: nothing to train")
    return kind(groups, lr=settings.learning_rate.peak, **_options(kind, chosen))  # type: ignore[no-any-return]


def check_optimizer(chosen: OptimizerSettings) -> None:
    """A wrong kind or option is refused before any rank starts."""
    _options(_class(chosen.kind), chosen)


def _class(name: str) -> Any:
    kinds = {word for word, item in vars(torch.optim).items() if inspect.isclass(item) and issubclass(item, Optimizer)}
    kinds -= {"Optimizer", "LBFGS", "SparseAdam"}
    if name not in kinds:
        raise InputError(f"optimizer.kind: torch.optim has no '{name}' that trains here: {nearest(name, kinds)}")
    return getattr(torch.optim, name)


def _options(kind: Any, chosen: OptimizerSettings) -> dict[str, Any]:
    accepted = set(inspect.signature(kind).parameters) - {"params", "lr", "weight_decay"}
    for name in chosen.options:
        if name not in accepted:
            raise InputError(f"optimizer.options.{name}: {chosen.kind} has no such option: {nearest(name, accepted)}")
    fused = {"fused": True} if chosen.kind in FUSED and not {"fused", "foreach"} & set(chosen.options) else {}
    return {**fused, **{name: tuple(v) if isinstance(v, list) else v for name, v in chosen.options.items()}}


def recipe_of(settings: Settings) -> Recipe:
    """What the cost model must know about the optimizer."""
    chosen = settings.optimizer
    switches = ("momentum", "amsgrad", "centered") if chosen.kind in ("SGD", "RMSprop", "Adam", "AdamW") else ()
    slots = SLOTS.get(chosen.kind, 2) + sum(bool(chosen.options.get(name)) for name in switches)
    return Recipe(
        optimizer_slots=slots,
        optimizer_scalar_bytes=0 if chosen.kind == "SGD" else STEP_COUNT_BYTES,
        clips=chosen.clip_norm != "none",
        fused_update=chosen.kind in ("Adam", "AdamW")
        and bool(chosen.options.get("fused", "foreach" not in chosen.options)),
    )


def learning_rate(step: int, num_steps: int, settings: LearningRateSettings) -> float:
    """At an optimizer step, counted from 0; the number of ranks and microbatches plays no part."""
    if step < settings.warmup_steps:
        return settings.peak * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.peak
    last = max(1, num_steps - 1 - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / last)
    left = 1 - done if settings.schedule == "linear" else (1 + cos(pi * done)) / 2
    return settings.peak * (settings.final_share + (1 - settings.final_share) * left)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
