"""Whether a model takes its own examples: one forward on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

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


class _Called(nn.Module):
    """A module with stand-ins for its tensors. It is no part of this one, whose tensors are nobody's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        made: dict[int, Tensor] = {}
        for _, tensor in named:
            made.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        tensors = {name: made[id(tensor)] for name, tensor in named}
        self.forward = lambda *args, **kwargs: functional_call(module, tensors, args, kwargs, tie_weights=False)
