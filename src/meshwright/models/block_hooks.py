"""Hooks on a block of a model that is cut into stages.

A hook of a block runs on the block's own stage only, as a part of the block. A forward hook may change what the block is given and
returns; what it keeps somewhere else (a list, a dict, a module) is not there on other stages. A full backward hook is tied by torch
to tensors that are made around the block's call, where stages meet. Recorders collect what blocks return for code outside of them
(`output_hidden_states` of transformers): they do so on every stage, after the block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from meshwright.core.errors import PlanError

RECORDERS = ("transformers.utils.output_capturing",)
"""Files that register hooks which record."""


def recorders_apart(block: nn.Module, call: Callable[[], Any], arguments: Any) -> Any:
    """What a call of the block returns; its recorders see that, and nothing inside of the call."""
    hooks = block._forward_hooks
    recorders = {key: hook for key, hook in hooks.items() if getattr(hook, "__module__", "") in RECORDERS}
    for key in recorders:
        del hooks[key]
    try:
        result = call()
    finally:
        hooks.update(recorders)
    for hook in recorders.values():
        hook(block, arguments, result)
    return result


def check_block_hooks(name: str, block: nn.Module) -> None:
    """Asked when a plan is made, and at each call of the block that is followed: a forward may add hooks itself."""
    for hook in (*block._backward_hooks.values(), *block._backward_pre_hooks.values()):
        raise PlanError(
            f"the model cannot be cut: a full backward hook of block '{name}'{_where(hook)} runs around the block's call, where "
            "stages meet; register it on a module inside of the block, or set pp to 1"
        )
    for hook in (*block._forward_hooks.values(), *block._forward_pre_hooks.values()):
        if any(isinstance(held, list | dict | set | nn.Module) for held in _captured(hook)):
            raise PlanError(
                f"the model cannot be cut: a forward hook of block '{name}'{_where(hook)} keeps what it sees in a list, dict or "
                "module outside the block, which other stages do not have; set it as an attribute in the block's own "
                "forward, or set pp to 1"
            )


def _where(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""


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
