"""Into which buckets gradients go that are reduced together. The runtime fills them, the cost model counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from meshwright.core.units import MIB

T = TypeVar("T")

FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB
"""torch's DistributedDataParallel closes its first bucket at 1 MiB and the others at 25 MiB; ours do as well."""


def fill_buckets(members: Iterable[T], num_bytes: Callable[[T], int]) -> list[list[T]]:
    """Members in their order; a bucket that is full is closed."""
    buckets: list[list[T]] = []
    filled, limit = 0, 0
    for member in members:
        if filled >= limit:
            limit = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            buckets.append([])
            filled = 0
        buckets[-1].append(member)
        filled += num_bytes(member)
    return buckets
