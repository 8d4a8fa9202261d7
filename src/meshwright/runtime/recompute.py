"""Recompute: a block keeps only its input and redoes its forward in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.core.plan import Plan


def mark_recompute(module: nn.Module, plan: Plan) -> None:
    """Wrap the forward of the plan's blocks. Module names stay as they are: no wrapper module is put in between."""
    for name in plan.recomputed("full"):
        block = module.get_submodule(name)
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return run
