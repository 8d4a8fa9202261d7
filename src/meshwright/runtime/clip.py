"""Clipping by the global norm, the same for whole and for sharded gradients.

‖g‖² = Σ over ranks and shards ‖g_shard‖²        -> one all-reduce of one number
g ← g · min(1, max_norm / ‖g‖)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def clip(parameters: Iterable[nn.Parameter], max_norm: float, group: dist.ProcessGroup | None) -> Tensor:
    """Scale gradients in place; returns the norm they had. `group`: the ranks that share the gradients, if any do."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm(gradients)
    if group is not None:
        squared = norm.to(torch.float64).square()
        dist.all_reduce(squared, group=group)
        norm = squared.sqrt().to(norm.dtype)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.dtype))
    return norm


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
