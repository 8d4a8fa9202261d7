"""Around a forward on tensors without values: nothing is logged, and Hugging Face models take the path of the real run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_log_of_fakes() -> Iterator[None]:
    """torch prints a traceback for each op that a fake tensor refuses; the error that follows says it in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_off, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_off


@contextmanager
def nothing_packed() -> Iterator[None]:
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
