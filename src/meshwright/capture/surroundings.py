"""What a trace changes around itself while it runs, each undone when it ends."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from meshwright.models.faked.unchanged import unchanged
from meshwright.models.fakes import no_log_of_fakes
from meshwright.models.packed import nothing_packed


@contextmanager
def quiet_surroundings(module: nn.Module) -> Iterator[None]:
    """All of them."""
    with ExitStack() as stack:
        for part in (_no_collection(), _no_compilation(), no_log_of_fakes(), nothing_packed(), unchanged(module)):
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
