"""Recompute: a block keeps only its input and redoes its forward in backward, or keeps all but its attention core."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.core.plan import Plan
from meshwright.runtime.selective import selective
from meshwright.runtime.watch import Watch


def mark_recompute(module: nn.Module, plan: Plan, watch: Watch) -> None:
    """Wrap the forward of the plan's blocks. Module names stay as they are: no wrapper module is put in between."""
    for name in plan.recomputed("full"):
        block = module.get_submodule(name)
        block.forward = _recomputed(block.forward, {} if plan.compile else {"context_fn": _watched(watch)})
    for name in plan.recomputed("selective"):
        block = module.get_submodule(name)
        block.forward = selective(block, name, watch)


def _recomputed(forward: Callable[..., Any], extra: dict[str, Any]) -> Callable[..., Any]:
    """Compiled code takes no contexts of ours: there the second run is part of backward."""

    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **extra, **options)

    return run


def _watched(watch: Watch) -> Callable[[], tuple[Any, Any]]:
    """What the first run and the second one are inside of."""
    return lambda: (nullcontext(), watch.region("recompute"))
