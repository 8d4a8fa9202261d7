"""When in a backward pass the gradients of a block's parameters are made: one by one, not all at once.

An op of backward makes a gradient of a parameter where its result has no tokens and no memory event tells of it: gradients are
not among the events. The share that is made before an op, by bytes, is all the walk of memory needs.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from meshwright.core.graph import Kind, Pass


class GradientLiveness:
    """Of one backward pass: how much of the block's gradients is there when an op begins."""

    def __init__(self, kind: Kind, one: Pass) -> None:
        seen = {event.source for event in one.events}
        made = [
            (number, kind.ops[number].written_bytes.fixed)
            for number in one.op_range
            if one.phase == "backward" and number not in seen and not kind.ops[number].written_bytes.per_sample
        ]
        self._makers = [number for number, _ in made]
        self._bytes = list(accumulate((num_bytes for _, num_bytes in made), initial=0.0))
        self.total_bytes = self._bytes[-1]

    def share_made_before(self, number: int) -> float:
        """0 where none is made yet, 1 where all are, or where the pass makes none."""
        if not self.total_bytes:
            return 1.0
        return self._bytes[bisect_left(self._makers, number)] / self.total_bytes
