"""Around a forward on tensors without values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_log_of_fakes() -> Iterator[None]:
    """torch prints a traceback for each op that a fake tensor refuses; the error that follows says it in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_off, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_off
