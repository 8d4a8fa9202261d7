"""Streamed blocks over dp ranks: each rank's home has its rows; a block is gathered on the device, its gradients reduced there.

gather   own rows of every cut parameter → all rows, one all-gather a block
reduce   gradients of all rows → the mean over ranks of own rows, one reduce-scatter; of whole ones, one all-reduce, in which ranks
         also tell each other which parameters have a gradient: one that no rank has is not updated, as in one process
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.offload.block_home import BlockHome
from meshwright.runtime.split.collectives import gather_into, scatter_into


def gather(home: BlockHome, local: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
    degree, cut = group.size(), home.cut_elements
    if cut:
        rows = torch.empty(degree * cut, dtype=local.dtype, device=local.device)
        gather_into(rows, local[:cut].contiguous(), group=group)
        _spread_rows(home, rows.view(degree, cut), full)
    full[degree * cut : home.full_elements].copy_(local[cut : home.local_elements])


def reduce(home: BlockHome, full: Tensor, has_gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What leaves for this rank's home. has_gradient: 1 or 0 for each member."""
    degree, cut = group.size(), home.cut_elements
    local = torch.empty(home.num_sent, dtype=full.dtype, device=full.device)
    if cut:
        rows = torch.empty(degree, cut, dtype=full.dtype, device=full.device)
        _collect_rows(home, full, rows)
        scatter_into(local[:cut], rows.view(-1), group=group)
    local[cut : home.local_elements].copy_(full[degree * cut : home.full_elements])
    local[home.local_elements :].copy_(has_gradient)
    dist.all_reduce(local[cut:], group=group)
    return local.div_(degree)


def _spread_rows(home: BlockHome, rows: Tensor, full: Tensor) -> None:
    for start, stop, view in _cut_parts(home, full, rows.shape[0]):
        view.copy_(rows[:, start:stop])


def _collect_rows(home: BlockHome, full: Tensor, rows: Tensor) -> None:
    for start, stop, view in _cut_parts(home, full, rows.shape[0]):
        rows[:, start:stop].copy_(view)


def _cut_parts(home: BlockHome, full: Tensor, degree: int) -> list[tuple[int, int, Tensor]]:
    """Of every cut parameter: where its rows lie in a rank's part, and all of them, one line a rank."""
    found, start = [], 0
    for member, view in zip(home.members, home.full_views(full), strict=True):
        if member.parts > 1:
            size = member.local_shape.numel()
            found.append((start, start + size, view.reshape(degree, size)))
            start += size
    return found
