"""What a trace changes around itself while it runs, each undone when it ends."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.models.faked.unchanged import unchanged
from meshwright.models.fakes import no_log_of_fakes
from meshwright.models.packed import nothing_packed
from meshwright.models.python_draws import python_silent
from meshwright.runtime._torch import FakeTensor


@contextmanager
def quiet_surroundings(module: nn.Module) -> Iterator[None]:
    """All of them."""
    with ExitStack() as stack:
        for part in (
            _no_collection(),
            _no_compilation(),
            _no_idle_moves(),
            no_log_of_fakes(),
            nothing_packed(),
            python_silent(set()),
            unchanged(module),
        ):
            stack.enter_context(part)
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector comes at random moments: what it frees would make two traces of one module differ."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _no_compilation() -> Iterator[None]:
    """Compiled parts run as they were written."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # that hooks are then called otherwise
        yield


@contextmanager
def _no_idle_moves() -> Iterator[None]:
    """A forward that says `self.router.to(dtype)` of a module that is so already: torch would put another tensor in the place of
    each parameter without a value, which it cannot do to one that is looked after."""
    usual: Any = nn.Module._apply

    def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        with torch.no_grad():
            is_so = all(isinstance(tensor, FakeTensor) and fn(tensor) is tensor for tensor in tensors)
        return module if is_so else usual(module, fn, recurse)

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = usual  # type: ignore[method-assign]
