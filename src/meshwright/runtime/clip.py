"""Clipping by the global norm, the same for whole and for sharded gradients.

‖g‖² = Σ over ranks and shards ‖g_shard‖²        -> one all-reduce of one number along each axis that divides gradients
g ← g · min(1, max_norm / ‖g‖)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def clip(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    groups: Sequence[dist.ProcessGroup] = (),
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """Scale gradients in place; returns the norm they had.

    groups: the ranks that share the gradients, one group for each axis along which they do. counted_elsewhere: copies of
    parameters whose gradients another rank, or another copy, adds to the norm.
    """
    left_out = {id(parameter) for parameter in counted_elsewhere}
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [local(parameter.grad) for parameter in owners if parameter.grad is not None]
    norm = get_total_norm(
        [gradient for owner, gradient in zip(owners, gradients, strict=True) if id(owner) not in left_out]
    )
    if groups:
        squared = norm.to(gradients[0].device if gradients else norm.device, torch.float64).square()
        for group in groups:
            dist.all_reduce(squared, group=group)
        norm = squared.sqrt().to(norm.dtype)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.dtype))
    return norm


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
