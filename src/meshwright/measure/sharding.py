"""What `fully_shard` costs around a collective on a CPU: hooks and views, and waking the threads that communicate.

A stack of B tiny blocks runs plain, and sharded block by block: each block is gathered before forward and before backward,
and reduced after it. Their kernels take no time, so that a step differs by three collectives a block and the host's work:

    host seconds of a collective = (sharded - plain) / 3B - mean of the three collectives on a few bytes

The collectives alone are timed in a row; in a step each of them has to wake its thread and to wait for the other ranks'.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.measure.links import collective_call
from meshwright.measure.stopwatch import typical_seconds
from meshwright.runtime.ranks import Rank

NUM_BLOCKS = 8
WIDTH = 16
BLOCK_BYTES = 4 * WIDTH * WIDTH


def measure_shard_call(rank: Rank) -> float:
    """Seconds that one collective of a sharded module takes beyond the collective."""
    plain, sharded = _stack(rank.device), _stack(rank.device)
    mesh = init_device_mesh(rank.device.type, (rank.num_ranks,))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    calls = [
        collective_call("all_gather", BLOCK_BYTES // rank.num_ranks, rank),
        collective_call("reduce_scatter", BLOCK_BYTES, rank),
    ]
    work = [_step(plain, rank.device), _step(sharded, rank.device), *calls]
    one, other, gather, reduce = (typical_seconds(each, rank.device, together=True) for each in work)
    return max(0.0, (other - one) / (3 * NUM_BLOCKS) - (2 * gather + reduce) / 3)


def _stack(device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(NUM_BLOCKS)))


def _step(module: nn.Module, device: torch.device) -> Callable[[], None]:
    batch = torch.ones(2, WIDTH, device=device)

    def step() -> None:
        module(batch).sum().backward()
        module.zero_grad()

    return step
