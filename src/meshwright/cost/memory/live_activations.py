"""Bytes that one microbatch has in use on a stage after each of its passes, and the part of them that is activations.

in use        the bytes forward has kept, less the bytes backward has freed
activations   the part of them that forward kept for blocks whose backward has not run; the gradient that backward hands on is a
              temporary
input         where a block does not need its input again, code outside the blocks frees it right after the block; a recomputed
              block needs its input until its backward is done
"""

from __future__ import annotations

from meshwright.cost.memory.footprint import Footprint


class LiveActivations:
    """Follows the passes of one stage in the order they run."""

    def __init__(self, received: float) -> None:
        self.in_use = received
        self.cached = 0.0
        """Copies of weights that autocast keeps until forward ends."""
        self._kept = {"received": received}
        self._late: dict[str, float] = {}

    @property
    def activations(self) -> float:
        return max(0.0, min(sum(self._kept.values()), self.in_use))

    def forward(self, block: str, footprint: Footprint, behind: str, *, keeps_input: bool) -> None:
        """After a forward pass. behind: the last named block, whose input a pass outside the blocks may free."""
        given_back = footprint.given_back
        change = footprint.kept
        if given_back and keeps_input:
            self._late[behind] = self._late.get(behind, 0.0) + given_back
            change, given_back = change + given_back, 0.0
        self.in_use += change
        self.cached += footprint.cached
        self._book(block, change + given_back)
        self._book(behind, -given_back)

    def returned(self, num_bytes: float) -> None:
        """When the gradient from the next stage has arrived."""
        self.in_use += num_bytes
        self._book("returned", num_bytes)

    def backward(self, block: str, footprint: Footprint) -> None:
        """After a backward pass."""
        self.in_use += footprint.kept - self._late.pop(block, 0.0)
        self._kept.pop(block, None)

    def _book(self, block: str, num_bytes: float) -> None:
        self._kept[block] = self._kept.get(block, 0.0) + num_bytes
