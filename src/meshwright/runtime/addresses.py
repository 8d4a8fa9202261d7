"""Parts of tensors, with the place they have in the whole: what a checkpoint needs to be read by other ranks than wrote it.

A tensor that lies over ep is this rank's experts only, under ZeRO a shard of them. Seen from outside it is one tensor over two
directions of ranks: cut over ep first, then over the ranks that hold the same experts, or the same on each of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.runtime.clip import local
from meshwright.runtime.experts import ExpertSpread, expert_parameters_of, expert_spread_of


def addressed(tensors: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """By name of a parameter: its tensor, or the tensors that an optimizer keeps for it. The memory stays the same: what is
    loaded into the result is in the originals."""
    spread, apart = expert_spread_of(module), expert_parameters_of(module)
    if spread is None:
        return dict(tensors)
    return {name: _addressed(found, apart[name], spread) if name in apart else found for name, found in tensors.items()}


def _addressed(found: Any, parameter: nn.Parameter, spread: ExpertSpread) -> Any:
    if isinstance(found, Mapping):
        return {name: _addressed(each, parameter, spread) for name, each in found.items()}
    if not isinstance(found, Tensor) or found.shape != parameter.shape:  # a count of steps
        return found
    shape = torch.Size([found.shape[0] * spread.ep.size(), *found.shape[1:]])
    inner: Placement = Shard(0) if isinstance(found, DTensor) else Replicate()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local(found).detach(), spread.mesh, (Shard(0), inner), run_check=False, shape=shape, stride=stride
    )
