"""The sketch of a module that is to be cut by a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.models.sketch import Sketch
from meshwright.models.twins import separate
from meshwright.runtime.deferred import materialise_outside
from meshwright.runtime.precision import STORED, sharded_policy


def draw(module: nn.Module, plan: Plan, device: torch.device) -> Sketch:
    """Blocks that are one module are first made modules of their own."""
    _check_hooks(module, plan)
    separate(module, plan.blocks)
    materialise_outside(module, plan.blocks)
    gathered = sharded_policy(plan).param_dtype if plan.zero else None

    def computing() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bf16" and plan.zero == 0)

    return Sketch(module, plan.blocks, gathered or STORED[plan.precision], device, computing)


def _check_hooks(module: nn.Module, plan: Plan) -> None:
    """A hook of a block runs on the block's own stage only: what it keeps somewhere else is not there on others."""
    for name in plan.blocks:
        block = module.get_submodule(name)
        for hook in (*block._forward_hooks.values(), *block._forward_pre_hooks.values()):
            if any(isinstance(held, list | dict | set | nn.Module) for held in _captured(hook)):
                code = getattr(hook, "__code__", None)
                where = f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
                raise PlanError(
                    f"the model cannot be cut: a forward hook of block '{name}'{where} keeps what it sees in a list, dict or "
                    "module outside the block, which other stages do not have; set it as an attribute in the block's own "
                    "forward, or set pp to 1"
                )


def _captured(hook: Any) -> list[Any]:
    """What a function refers to beside its arguments."""
    bare = hook.func if isinstance(hook, partial) else hook
    cells = [cell.cell_contents for cell in getattr(bare, "__closure__", None) or () if not _is_empty(cell)]
    return [*cells, *(hook.args if isinstance(hook, partial) else ()), *(getattr(bare, "__defaults__", None) or ())]


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
