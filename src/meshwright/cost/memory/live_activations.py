"""What one microbatch has in use on a stage, pass by pass, and on whose account.

in use        what forward keeps, less what backward gives back
activations   of that, what forward kept for blocks that have not gone backward; what backward hands on is a temporary
input         some blocks do not need their input again, and code outside the blocks gives it back right behind them;
              a block that is recomputed does need it, until its backward is done
"""

from __future__ import annotations

from meshwright.cost.memory.footprint import Footprint


class LiveActivations:
    """Follows the passes of one stage in order."""

    def __init__(self, received: float) -> None:
        self.in_use = received
        self.cached = 0.0
        """Copies of weights that autocast holds until forward ends."""
        self._kept = {"received": received}
        self._late: dict[str, float] = {}

    @property
    def activations(self) -> float:
        return max(0.0, min(sum(self._kept.values()), self.in_use))

    def forward(self, block: str, footprint: Footprint, behind: str, *, keeps_input: bool) -> None:
        """A pass of forward; `behind` is the last named block, whose input a pass outside the blocks may give back."""
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
        """The gradient that the stage behind sends."""
        self.in_use += num_bytes
        self._book("returned", num_bytes)

    def backward(self, block: str, footprint: Footprint) -> None:
        self.in_use += footprint.kept - self._late.pop(block, 0.0)
        self._kept.pop(block, None)

    def _book(self, block: str, num_bytes: float) -> None:
        self._kept[block] = self._kept.get(block, 0.0) + num_bytes
