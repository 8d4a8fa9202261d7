"""Limits on a module while its constructor runs: a few letters of a config can ask for a million modules, or for more memory than
there is. torch tells of every part that a module is given; the part that is one too many is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from meshwright.core.bounds import MOST_MODULES
from meshwright.core.errors import ModelError, shortened
from meshwright.core.units import format_bytes
from meshwright.runtime._torch import FakeTensor


class TooManyModulesError(ModelError):
    """A constructor that goes on and on."""


@contextmanager
def counted_modules() -> Iterator[None]:
    """No more than MOST_MODULES of them."""
    count = 0

    def look(module: nn.Module, name: str, part: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise TooManyModulesError(
                f"the model has more than {MOST_MODULES} modules: lower its number of layers, blocks or experts"
            )

    handle = register_module_module_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def counted_bytes(most: int, reason: Exception) -> Iterator[None]:
    """Parameters of no more than so many bytes. reason: why the module could not be built without memory."""
    held = 0

    def look(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal held
        if isinstance(parameter, Tensor) and not parameter.is_meta and not isinstance(parameter, FakeTensor):
            held += parameter.numel() * parameter.element_size()
        if held > most:
            raise ModelError(
                f"the model is too large to be built on this machine, more than {format_bytes(most)}, and cannot be built without "
                f"memory: {type(reason).__name__}: {shortened(' '.join(str(reason).split()))}"
            )

    handle = register_module_parameter_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()
