"""Groups of parameters that are gathered and reduced together. The runtime shards by them, the cost model counts by them.

ZeRO gathers and reduces a block at a time: an item of a list (`blocks.3`) is a group of its own, unless it shares a parameter with
something outside it; all else is one group, named ''.                                            -> shard_groups
Gradients of replicas are reduced in buckets.                                                     -> fill_buckets
Where a share of the optimizer state is offloaded, the first parameters keep theirs on the device. The next forward needs the first
blocks first, and their gradients come last: forward can begin while the host still updates the rest. What is in no block is needed
at once, and comes before all blocks.                                                             -> order_of_need, num_kept
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from meshwright.core.graph import Parameter
from meshwright.core.names import is_list_item
from meshwright.core.units import MIB

T = TypeVar("T")

FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB
"""torch's DistributedDataParallel closes its first bucket at 1 MiB and the others at 25 MiB; ours do as well."""
PIECE_BYTES = 256 * 2**20
"""Bytes of one piece of logits in fp32: large enough that each product fills a device, small against a model's activations."""


def shard_groups(parameters: Iterable[Parameter], blocks: Iterable[str]) -> dict[str, tuple[Parameter, ...]]:
    """Group name → its parameters, each tensor once; '' comes first and may be empty."""
    items = set(filter(is_list_item, blocks))
    listed = list(parameters)
    owner = {parameter.name: place_of(parameter.name, items) for parameter in listed}
    for parameter in listed:
        if parameter.tied_to is not None and owner[parameter.name] != owner[parameter.tied_to]:
            items -= {owner[parameter.name], owner[parameter.tied_to]}
    groups: dict[str, list[Parameter]] = {"": []}
    for parameter in listed:
        if parameter.tied_to is None:
            groups.setdefault(place_of(parameter.name, items), []).append(parameter)
    return {name: tuple(group) for name, group in groups.items()}


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


def order_of_need(named: Iterable[tuple[str, T]], blocks: Sequence[str]) -> list[tuple[str, T]]:
    """Parameters (name, anything) as a forward needs them: outside all blocks, then block by block, each in the given order."""
    numbers = {name: number for number, name in enumerate(blocks)} | {"": -1}
    return sorted(named, key=lambda item: numbers[place_of(item[0], numbers)])


def place_of(name: str, blocks: Container[str]) -> str:
    """The block a parameter is in; empty where it is in none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    return next((prefix for prefix in prefixes if prefix in blocks), "")


def num_kept(elements: Sequence[int], share: float) -> int:
    """How many of the first parameters stay: as many as fit into the share that is not offloaded."""
    room = (1 - share) * sum(elements) * (1 + 1e-9)
    return sum(taken <= room for taken in accumulate(elements)) if share < 1 else 0
