"""Which parameters keep their optimizer state on the device when a share of it is offloaded: one rule for cost and runtime.

The next forward needs the first blocks first, and their gradients come last: they are the ones that stay, so that forward can
begin while the host still updates the rest. What is in no block is needed at once, and comes before all blocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

Item = TypeVar("Item")


def order_of_need(named: Iterable[tuple[str, Item]], blocks: Sequence[str]) -> list[tuple[str, Item]]:
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
