"""Small values from every rank to every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.core.collective import Axis
from meshwright.runtime.places import Place

T = TypeVar("T")


def all_ranks(value: T) -> list[T]:
    """The value each rank gave, in the order of ranks."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, on every rank; others as they are."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    group = tensor.device_mesh.get_group()
    most = -(-tensor.shape[0] // group.size())
    own = tensor.to_local().detach()
    if dist.get_backend(group) == "gloo":
        own = own.cpu()
    padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    shards = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(shards, padded, group=group)
    return torch.cat(shards)[: tensor.shape[0]]


def put_together(tensor: Tensor, places: Iterable[Place], groups: Mapping[Axis, dist.ProcessGroup]) -> Tensor:
    """A tensor from the parts that ranks hold of it: its ZeRO shards, and its cuts, the last made first."""
    result = whole(tensor)
    for axis, dim in reversed(tuple(places)):
        parts = [torch.empty_like(result) for _ in range(groups[axis].size())]
        dist.all_gather(parts, result.contiguous(), group=groups[axis])
        result = torch.cat(parts, dim)
    return result


def wait_for_all() -> None:
    dist.barrier()
