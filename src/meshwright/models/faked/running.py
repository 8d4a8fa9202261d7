"""A model called on tensors without memory: whether it takes its own examples, and what a part of it returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.models.faked.attributes import fake_attributes
from meshwright.models.faked.build import build_followable
from meshwright.models.faked.unchanged import unchanged
from meshwright.models.fakes import no_log_of_fakes
from meshwright.models.objective import Batch, call, map_batch
from meshwright.models.packed import nothing_packed
from meshwright.runtime._torch import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode


def runs(build: Callable[[], nn.Module], batch: Batch) -> bool:
    """Where a forward asks for a value, it has come as far as can be told. What else it raises is raised."""
    module = build_followable(build)
    with no_log_of_fakes(), nothing_packed(), unchanged(module), FakeTensorMode(allow_non_fake_inputs=True):
        fake_attributes(module, None)
        with suppress(DataDependentOutputException, DynamicOutputShapeException):
            call(_Called(module), map_batch(torch.empty_like, batch))
    return True


def call_on_fakes(
    build: Callable[[], nn.Module], function: Callable[[nn.Module, Tensor], Any], size: tuple[int, ...]
) -> Any:
    """What a function of the model and a tensor of this size returns."""
    part = _Part(build_followable(build), function)
    with no_log_of_fakes(), unchanged(part.inner), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake_attributes(part, None)
        return functional_call(part, _stand_ins(part), (torch.empty(size),), tie_weights=False)


class _Part(nn.Module):
    def __init__(self, inner: nn.Module, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.function = function

    def forward(self, given: Tensor) -> Any:
        return self.function(self.inner, given)


def _stand_ins(module: nn.Module) -> dict[str, Tensor]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    made: dict[int, Tensor] = {}
    for _, tensor in named:
        made.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    return {name: made[id(tensor)] for name, tensor in named}


class _Called(nn.Module):
    """A module with stand-ins for its tensors. It is no part of this one, whose tensors are nobody's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tensors = _stand_ins(module)
        self.forward = lambda *args, **kwargs: functional_call(module, tensors, args, kwargs, tie_weights=False)
