"""What a trace changes around itself while it runs, each undone when it ends."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def quiet_surroundings(module: nn.Module) -> Iterator[None]:
    """All of them."""
    with ExitStack() as stack:
        for part in (_no_collection(), _no_compilation(), _no_log(), _nothing_packed(), _unchanged(module)):
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
def _no_log() -> Iterator[None]:
    """torch prints a traceback for each op that a fake tensor refuses; the error that follows says it in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_off = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = was_off


@contextmanager
def _nothing_packed() -> Iterator[None]:
    """Hugging Face models are told that every sample is a sequence of its own.

    They look into the position ids for samples packed into one sequence. A fake tensor has none to look into, so they
    would build masks that a plain batch does not need, and attention would take a slower path than in the real run.
    """
    masking = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    own = getattr(masking, name, None)
    if masking is None or own is None:
        yield
        return

    def none_found(*_: Any, **__: Any) -> None:
        return None

    setattr(masking, name, none_found)
    try:
        yield
    finally:
        setattr(masking, name, own)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """What a forward sets on its module, a counter or a loss of its own, is as it was before."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
