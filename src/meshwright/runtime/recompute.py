"""Recompute: a block keeps only its input and redoes its forward in backward, or keeps all but its attention core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.core.plan import Plan
from meshwright.models.follow import Follower
from meshwright.models.own_recompute import own_recompute_left_out, planned
from meshwright.runtime._torch import _get_current_function_mode_stack
from meshwright.runtime.draws.mode import Draws
from meshwright.runtime.selective import selective
from meshwright.runtime.side_effects import Call, SideEffects
from meshwright.runtime.watch import Watch


def mark_recompute(module: nn.Module, plan: Plan, watch: Watch) -> None:
    """Wrap the forward of the plan's blocks. Module names stay as they are: no wrapper module is put in between."""
    for name in plan.recomputed("full"):
        block = module.get_submodule(name)
        block.forward = _compiled(block.forward) if plan.compile else _recomputed(block, name, watch)
    for name in plan.recomputed("selective"):
        block = module.get_submodule(name)
        block.forward = selective(block, name, watch)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code takes no contexts of ours: there the second run is part of backward."""

    redone = planned(forward)

    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        return checkpoint(redone, *arguments, use_reentrant=False, **options)

    return run


def _recomputed(block: nn.Module, name: str, watch: Watch) -> Callable[..., Any]:
    forward, effects = block.forward, SideEffects(block, name)
    redone = planned(forward)

    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        call = effects.begin((arguments, options))

        def contexts() -> tuple[Any, Any]:
            """What the first run and the second one are inside of."""
            return nullcontext(), _again(watch, _modes(), call)

        made = checkpoint(redone, *arguments, use_reentrant=False, context_fn=contexts, **options)
        call.end()
        return made

    return run


def _modes() -> list[Any]:
    """The function modes a block runs in: torch leaves them in backward, and a cast or a split weight would then mean something
    else than it did."""
    modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, Follower)]
    return [mode.as_now() if isinstance(mode, Draws) else mode for mode in modes]


@contextmanager
def _again(watch: Watch, modes: list[Any], call: Call) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(watch.region("recompute"))
        stack.enter_context(call.as_before())
        stack.enter_context(own_recompute_left_out())
        for mode in modes:
            stack.enter_context(mode.as_now() if isinstance(mode, Draws) else mode)
        yield
