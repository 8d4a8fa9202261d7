"""Liveness of gradients: how much of a block's parameter gradients a backward pass has made when each of its ops begins.

Backward makes gradients one by one, not all at once. The memory events of a pass do not list gradients of parameters, so they
are found here: an op of backward makes one where its result has no tokens and no memory event names that op.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from meshwright.core.graph import Kind, Pass


class GradientLiveness:
    """The gradients of a block's parameters over one backward pass."""

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
        """The share of the gradients, by bytes, that the ops before this one have made; 1 where the pass makes no gradients."""
        if not self.total_bytes:
            return 1.0
        return self._bytes[bisect_left(self._makers, number)] / self.total_bytes
