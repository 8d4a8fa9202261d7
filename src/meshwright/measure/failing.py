"""What a model raises under a plan and does not in one process: an error with its module and line, told apart from a refusal."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from meshwright.core.errors import FailsUnderPlanError, MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.result import describe
from meshwright.runtime.rank import is_broken_link, lines_of


@contextmanager
def explained(plan: Plan, module: nn.Module | None = None) -> Iterator[None]:
    """Errors of ours are refusals, and pass. module: whose parts are named."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        if is_broken_link(error):
            raise
        raise FailsUnderPlanError(
            f"the model runs in one process, but under {describe(plan)} {_where(error, module)} raises {type(error).__name__}: "
            f"{error} ({lines_of(error)}): nothing refused this plan, which is a fault of Meshwright's: leave out one of the "
            "plan's degrees, or change that line, and report the model"
        ) from error


def _where(error: BaseException, module: nn.Module | None) -> str:
    """The innermost module whose own code the error went through."""
    names = {id(part): name for name, part in module.named_modules()} if module is not None else {}
    found = "it"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part = frame.f_locals.get("self")
        if isinstance(part, nn.Module) and "/torch/" not in frame.f_code.co_filename:
            name = names.get(id(part), "").removeprefix("module.")
            found = f"module '{name}' ({type(part).__name__})" if name else f"the model ({type(part).__name__})"
    return found
