"""Parameters in 16 bits on the device, while the values an optimizer updates are kept elsewhere (runtime/offload).

The arithmetic is that of a sharded model (`sharded_policy`): parameters and floating inputs of the module and of its blocks are
16-bit numbers, buffers stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.plan import Plan
from meshwright.models.objective import map_batch
from meshwright.runtime.deferred import is_deferred, materialise_buffers, value_of
from meshwright.runtime.precision import LOWER


class Values:
    """What parameters were before they were lowered, handed over one by one so that none is kept twice."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def put(self, name: str, value: Tensor) -> None:
        self._found[name] = value

    def take(self, name: str) -> Tensor | None:
        """fp32 values on whatever device they are; those of a deferred module are made now."""
        value = self._found.pop(name, None)
        if value is None:
            return None
        return (value_of(value) if is_deferred(value) else value).detach().to(torch.float32)

    @property
    def names(self) -> list[str]:
        return list(self._found)


@torch.no_grad()
def lower(module: nn.Module, plan: Plan, device: torch.device) -> Values:
    """Parameters become 16-bit ones on the device, still empty; tied ones stay tied. Buffers move there as they are."""
    values, made = Values(), dict[int, nn.Parameter]()
    dtype = LOWER[plan.precision]
    for path, part in module.named_modules():
        materialise_buffers(part)
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                values.put(
                    f"{path}.{name}" if path else name, parameter.data if not is_deferred(parameter) else parameter
                )
                made[id(parameter)] = _lowered(parameter, dtype, device)
            part._parameters[name] = made[id(parameter)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    _cast_inputs(module, plan, dtype)
    return values


def _lowered(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """The same object where it has memory: optimizers and the user may hold it."""
    empty = torch.empty(parameter.shape, dtype=dtype, device=device)
    if is_deferred(parameter):
        return nn.Parameter(empty, parameter.requires_grad)
    parameter.data = empty
    return parameter


@torch.no_grad()
def fill_rest(module: nn.Module, values: Values) -> None:
    """Parameters that nothing updates get their values."""
    named = dict(module.named_parameters(remove_duplicate=False))
    for name in values.names:
        value = values.take(name)
        if value is not None:
            named[name].copy_(value)


def _cast_inputs(module: nn.Module, plan: Plan, dtype: torch.dtype) -> None:
    def cast(part: nn.Module, arguments: Any, options: Any) -> Any:
        return map_batch(lambda tensor: narrow(tensor, dtype), arguments), map_batch(
            lambda tensor: narrow(tensor, dtype), options
        )

    for part in _parts(module, plan):
        part.register_forward_pre_hook(cast, with_kwargs=True)


def _parts(module: nn.Module, plan: Plan) -> Iterator[nn.Module]:
    yield module
    yield from (module.get_submodule(name) for name in plan.blocks)


def narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
