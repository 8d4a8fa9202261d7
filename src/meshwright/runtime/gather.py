"""Small values from every rank to every rank."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def all_ranks(value: T) -> list[T]:
    """The value each rank gave, in the order of ranks."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def wait_for_all() -> None:
    dist.barrier()
