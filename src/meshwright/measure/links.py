"""How fast ranks exchange data, and how much of that hides behind compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.cluster import CollectiveTime, Link
from meshwright.core.collective import CollectiveKind
from meshwright.measure.kernels import cold_tensors
from meshwright.measure.stopwatch import typical_seconds
from meshwright.runtime.ranks import Rank
from meshwright.runtime.split.collectives import gather_into, scatter_into

CPU_SIZES = (8, 2**10, 2**16, 2**20, 2**22, 2**24)
CUDA_SIZES = (8, 2**12, 2**18, 2**22, 2**26, 2**28)
OVERLAP_BYTES = 2**22
MOST_BYTES = {"cpu": 2**28, "cuda": 2**40}
"""Sizes at which all ranks together receive more are not measured: the rate is known from smaller ones."""


def measure_collectives(rank: Rank) -> tuple[CollectiveTime, ...]:
    """Seconds of each kind at each size of the input tensor; the slowest rank's, the same on all."""
    sizes = CUDA_SIZES if rank.device.type == "cuda" else CPU_SIZES
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    parted = ("reduce_scatter", "all_to_all")  # a part for every rank
    keys = [
        (kind, size)
        for kind in kinds
        for size in sizes
        if (size >= 4 * rank.num_ranks or kind not in parted)
        and _received(kind, size, rank.num_ranks) <= MOST_BYTES[rank.device.type]
    ]
    seconds = [typical_seconds(collective_call(kind, size, rank), rank.device, together=True) for kind, size in keys]
    shared = torch.tensor(seconds, dtype=torch.float64, device=rank.device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return tuple(
        CollectiveTime(kind=kind, num_ranks=rank.num_ranks, num_bytes=size, seconds=float(value))
        for (kind, size), value in zip(keys, shared.tolist(), strict=True)
    )


def _received(kind: CollectiveKind, num_bytes: int, num_ranks: int) -> int:
    """By all ranks together, which a CPU's memory moves at once."""
    return num_bytes * num_ranks * (num_ranks if kind == "all_gather" else 1)


def measure_host_link(rank: Rank, per_host: int) -> tuple[CollectiveTime, ...]:
    """All-reduces inside each host, all hosts at once: the smallest and the largest; nothing where a host has one rank."""
    if per_host == 1:
        return ()
    sizes = CUDA_SIZES if rank.device.type == "cuda" else CPU_SIZES
    group, _ = dist.new_subgroups(per_host)
    found = []
    for size in (sizes[0], sizes[-1]):
        tensors = cold_tensors(size // 4, rank.device, torch.float32)

        def work(tensors: Iterator[Tensor] = tensors) -> None:
            dist.all_reduce(next(tensors), group=group)

        found.append(typical_seconds(work, rank.device, together=True))
    shared = torch.tensor(found, dtype=torch.float64, device=rank.device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    dist.destroy_process_group(group)
    return tuple(
        CollectiveTime(kind="all_reduce", num_ranks=per_host, num_bytes=size, seconds=float(value))
        for size, value in zip((sizes[0], sizes[-1]), shared.tolist(), strict=True)
    )


def link_of(points: tuple[CollectiveTime, ...]) -> Link | None:
    """The link that would make a ring all-reduce of all ranks as fast as the measured ones: for groups of fewer ranks.

    g ranks, n bytes:  t = 2 (g-1) hop + 2 (g-1)/g · n / bandwidth      hop from the smallest n, bandwidth from the largest
    """
    reduces = sorted((one.num_bytes, one.seconds, one.num_ranks) for one in points if one.kind == "all_reduce")
    if not reduces:
        return None
    (_, least, ranks), (largest, most, _) = reduces[0], reduces[-1]
    moving = max(most - least, 1e-3 * most)
    bandwidth = 2 * (ranks - 1) / ranks * largest / moving
    return Link(bytes_per_second=bandwidth, latency_seconds=least / (2 * (ranks - 1)), origin="probe")


def collective_call(kind: CollectiveKind, num_bytes: int, rank: Rank) -> Callable[[], Any]:
    """A call whose input tensor has this many bytes and was not used for a while."""
    length = num_bytes // 4
    tensors = cold_tensors(length, rank.device, torch.float32)
    if kind == "all_gather":
        outputs = cold_tensors(length * rank.num_ranks, rank.device, torch.float32)
        return lambda: gather_into(next(outputs), next(tensors))
    if kind == "reduce_scatter":
        part = torch.empty(length // rank.num_ranks, device=rank.device)
        return lambda: scatter_into(part, next(tensors)[: part.numel() * rank.num_ranks])
    if kind == "all_to_all":
        arrived = torch.empty(length // rank.num_ranks * rank.num_ranks, device=rank.device)
        return lambda: dist.all_to_all_single(arrived, next(tensors)[: arrived.numel()])
    if kind == "broadcast":
        return lambda: dist.broadcast(next(tensors), src=0)
    return lambda: dist.all_reduce(next(tensors))


def measure_overlap(rank: Rank) -> float:
    """(compute + communication - both at once) / the shorter of the two: 1 where one hides the other, 0 where they queue."""
    edge = 512 if rank.device.type == "cpu" else 4096
    matrix = torch.randn(edge, edge, device=rank.device)
    message = torch.ones(OVERLAP_BYTES // 4, device=rank.device)
    communicate = typical_seconds(lambda: dist.all_reduce(message), rank.device, together=True)
    one_product = typical_seconds(lambda: matrix @ matrix, rank.device, together=True)
    times = _same_everywhere(max(1, round(communicate / one_product)), rank)
    compute = typical_seconds(lambda: _products(matrix, times), rank.device, together=True)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        _products(matrix, times)
        work.wait()

    together = typical_seconds(both, rank.device, together=True)
    return (compute + communicate - together) / min(compute, communicate)


def _products(matrix: Tensor, times: int) -> None:
    for _ in range(times):
        matrix @ matrix


def _same_everywhere(value: int, rank: Rank) -> int:
    tensor = torch.tensor([value], dtype=torch.int64, device=rank.device if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(tensor, src=0)
    return int(tensor.item())
