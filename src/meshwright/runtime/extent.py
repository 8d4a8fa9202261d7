"""Which part of a whole tensor this rank holds, as stretches of each dim: what a reader of whole tensors must fetch, and no more.

    W[D, F_tp] under ZeRO, rank (tp 1, dp 0) of (2, 2)      dim 0: [0, D/2)      dim 1: [F/2, F)
    fused query, key and value [3F_tp, D], rank tp 1 of 2   dim 0: [F/2, F), [3F/2, 2F), [5F/2, 3F)      (3 runs)

Cuts come first, in the order they were made (`places.py`), then the shards of ZeRO, which are of what the cuts left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch.distributed.tensor import DTensor, Shard

from meshwright.runtime.addresses import Addresses


class Stretch(NamedTuple):
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Stretches = tuple[Stretch, ...]
"""One after another, they are what a rank has of a dim."""
Extent = tuple[Stretches, ...]
"""Of every dim."""


def whole_extent(shape: Iterable[int]) -> Extent:
    return tuple((Stretch(0, size),) for size in shape)


def extent_sizes(extent: Extent) -> tuple[int, ...]:
    return tuple(sum(stretch.size for stretch in stretches) for stretches in extent)


def extent_of(addresses: Addresses, name: str) -> Extent:
    """This rank's part of a parameter."""
    parameter, places = addresses.parameters[name], addresses.places.get(name, ())
    shape = list(parameter.shape)
    for place in places:
        shape[place.dim] *= addresses.groups[place.axis].size()
    extent = list(whole_extent(shape))
    for place in places:
        group = addresses.groups[place.axis]
        extent[place.dim] = cut_runs(extent[place.dim], place.runs, group.size(), group.rank())
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for direction, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                size, rank = mesh.size(direction), mesh.get_local_rank(direction)
                extent[placement.dim] = shard(extent[placement.dim], size, rank)
    return tuple(extent)


def cut_runs(stretches: Stretches, runs: int, num_ranks: int, rank: int) -> Stretches:
    """The dim is that many equal runs, and each of them is cut evenly."""
    run = sum(stretch.size for stretch in stretches) // runs
    part = run // num_ranks
    return tuple(
        piece
        for number in range(runs)
        for piece in between(stretches, run * number + part * rank, run * number + part * (rank + 1))
    )


def shard(stretches: Stretches, num_ranks: int, rank: int) -> Stretches:
    """As torch shards a dim that need not divide: equal parts, the last ones shorter or empty."""
    total = sum(stretch.size for stretch in stretches)
    part = -(-total // num_ranks)
    return between(stretches, min(part * rank, total), min(part * (rank + 1), total))


def between(stretches: Stretches, start: int, stop: int) -> Stretches:
    """What is at positions start … stop of stretches laid one after another."""
    found, before = [], 0
    for stretch in stretches:
        first, last = max(start - before, 0), min(stop - before, stretch.size)
        if first < last:
            found.append(Stretch(stretch.start + first, stretch.start + last))
        before += stretch.size
    return tuple(found)
