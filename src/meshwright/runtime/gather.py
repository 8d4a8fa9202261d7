"""Tensors put together from the parts that ranks hold, and answers that all ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.core.axes import Axis
from meshwright.runtime.messages.exchange import all_ranks, device_of_messages
from meshwright.runtime.places import Place
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Cut


def is_so_anywhere(answer: bool) -> bool:
    """Whether some rank says yes; the same on all ranks."""
    flag = torch.tensor(float(answer), device=device_of_messages())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def send_from_first_rank(tensor: Tensor) -> None:
    """Its values to all ranks, whatever device and memory layout they have there."""
    sent = tensor.detach().to(device_of_messages(), copy=True).contiguous()
    dist.broadcast(sent, src=0)
    tensor.detach().copy_(sent)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, on every rank; others as they are."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.device.type == "cuda" and dist.get_backend() == "gloo":
        # torch 2.11 frees the buffers of this exchange too early and the process dies; shards along dim 0 can go by hand
        shards = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
        return torch.cat(all_ranks(tensor.to_local().detach().cpu(), Tensor, shards))
    gathered: Tensor = tensor.full_tensor()
    return gathered.detach()


def put_together(tensor: Tensor, places: Iterable[Place], groups: Mapping[Axis, dist.ProcessGroup]) -> Tensor:
    """A tensor from the parts that ranks hold of it: its ZeRO shards, and its cuts, the last made first."""
    result = whole(tensor)
    for place in reversed(tuple(places)):
        group = groups[place.axis]
        ranks = Ranks(place.axis, group.size(), group.rank(), group)
        result = ranks.gather(result, Cut(place.dim, place.runs))
    return result


def wait_for_all() -> None:
    dist.barrier()
