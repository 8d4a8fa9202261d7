"""What a Program holds on its device between steps, by category."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshwright.core.estimate import MemoryParts
from meshwright.models.objective import Batch, tensors_of
from meshwright.runtime.clip import local
from meshwright.runtime.experts import expert_parameters_of
from meshwright.runtime.optimizer import state_tensors

if TYPE_CHECKING:
    from meshwright.runtime.program import Program


def held_bytes(program: Program, batch: Batch) -> MemoryParts:
    """Bytes on the device beside what a step itself needs."""
    module, device = program.module, program.device
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return MemoryParts(
        parameters=_bytes([*module.parameters(), *module.buffers()], device),
        gradients=max(_bytes(gradients, device), _bucket_bytes(program.spread_module, device)),
        optimizer_state=_bytes(_state(program), device),
        inputs=sum(
            tensor.numel() * tensor.element_size() for tensor in tensors_of(batch) if tensor.device.type == device.type
        ),
    )


def _state(program: Program) -> Iterable[Tensor]:
    """Of state that is on the host, what stayed on the device."""
    if program.host is None:
        return state_tensors(program.optimizer)
    kept = ((*one.state.values(), one.master) for one in program.host.state.kept)
    return (tensor for found in kept for tensor in found if isinstance(tensor, Tensor))


def _bucket_bytes(module: nn.Module, device: torch.device) -> int:
    """Replicas keep their gradient buckets from step to step, also while no gradient points into them."""
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return 0
    apart = expert_parameters_of(module.module)
    own = module.module.named_parameters()
    return _bytes((parameter for name, parameter in own if parameter.requires_grad and name not in apart), device)


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of this rank's storages on the device, each once."""
    sizes = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        if storage.device.type == device.type:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
