"""Around a forward on tensors without values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributions import Distribution

from meshwright.runtime._torch import FakeTensor, checks_distributions


@contextmanager
def no_log_of_fakes() -> Iterator[None]:
    """torch prints a traceback for each op that a fake tensor refuses; the error that follows says it in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_off, log.disabled = log.disabled, True
    try:
        with _numbers_in_words(), unchecked_distributions():
            yield
    finally:
        log.disabled = was_off


@contextmanager
def _numbers_in_words() -> Iterator[None]:
    """A number in a text (`experts[f"expert_{number}"]`) asks for its value, as `.item()` does: torch's own would write the kind of
    tensor it is, and the model would look for something of that name."""
    own: Any = Tensor.__format__

    def formatted(tensor: Tensor, spec: str) -> str:
        return (
            format(tensor.item(), spec) if isinstance(tensor, FakeTensor) and tensor.dim() == 0 else own(tensor, spec)
        )

    Tensor.__format__ = formatted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__format__ = own  # type: ignore[method-assign]


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """`Categorical(logits=…)` looks whether its arguments are numbers: of tensors without values none is. A stage follows
    others' blocks on such, and its own code must go the same way."""
    checked = checks_distributions()
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)
