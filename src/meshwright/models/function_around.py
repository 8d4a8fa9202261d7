"""Blocks that a model calls inside the forward of an `autograd.Function`: reversible layers, recompute of one's own.

Their backward is the function's, which runs them again and asks for their gradients by itself. A stage that has some of them only
could not: nothing would tell the stages before it that a gradient is to come.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch.autograd.function import FunctionCtx

from meshwright.core.errors import PlanError


def refuse_inside_function(block: str) -> None:
    """To be called where a block is called."""
    frame = _function_around()
    if frame is not None:
        name = frame.f_code.co_qualname.rpartition(".")[0].rpartition(".")[2] or frame.f_code.co_name
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_code.co_firstlineno}"
        raise PlanError(
            f"the model cannot be cut at block '{block}': the function '{name}' ({place}) calls it, and runs its backward itself; "
            "set pp to 1, or call the block outside of the function"
        )


def _function_around() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_own = not str(frame.f_globals.get("__name__", "")).startswith(("torch.", "meshwright."))
        if is_own and code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            return frame
        frame = frame.f_back
    return None
