"""Seconds a piece of work takes: the median of the faster half of the repeats.

The slower half is what other programs on the machine did to us, not what a step will see.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CALLS_IN_A_ROW = 10
LEAST_SECONDS = 0.04
LEAST_REPEATS, MOST_REPEATS = 3, 50


def typical_seconds(work: Callable[[], Any], device: torch.device, *, together: bool = False) -> float:
    """Repeat until enough time has been seen. `together`: every rank repeats equally often, as collectives need."""
    work()
    first = _once(work, device)
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(LEAST_SECONDS / max(first, 1e-9))))
    if together:
        repeats = _agree(repeats, device)
    seconds = sorted(_once(work, device) for _ in range(repeats))
    return statistics.median(seconds[: (repeats + 1) // 2])


def _once(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call. On a GPU a call is one of a row: alone it would be timed with its launch and the wait for it."""
    calls = CALLS_IN_A_ROW if device.type == "cuda" else 1
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agree(repeats: int, device: torch.device) -> int:
    tensor = torch.tensor([repeats], dtype=torch.int64, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor.item())
