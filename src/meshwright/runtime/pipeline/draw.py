"""The sketch of a module that is to be cut by a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from meshwright.core.plan import Plan
from meshwright.models.block_hooks import check_block_hooks
from meshwright.models.sketch import Sketch
from meshwright.models.twins import separate
from meshwright.runtime.deferred import materialise_outside
from meshwright.runtime.precision import STORED, sharded_policy


def draw(module: nn.Module, plan: Plan, device: torch.device) -> Sketch:
    """Blocks that are one module are first made modules of their own."""
    for name in plan.blocks:
        check_block_hooks(name, module.get_submodule(name))
    separate(module, plan.blocks)
    materialise_outside(module, plan.blocks)
    gathered = sharded_policy(plan).param_dtype if plan.zero else None

    def computing() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bf16" and plan.zero == 0)

    return Sketch(module, plan.blocks, gathered or STORED[plan.precision], device, computing)
