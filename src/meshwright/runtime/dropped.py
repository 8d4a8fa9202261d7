"""How many choices of experts a model drops.

A module that routes tokens says after each forward how many (token, expert) choices it made, `routed_tokens`, and how many of
them found their expert full, `dropped_tokens` (a tensor, or None where it drops nothing). A step adds them up over blocks,
microbatches and ranks; a forward that is redone is not counted again.
"""

from __future__ import annotations

from torch import Tensor, nn


class Dropped:
    """The modules of a model that say what they drop."""

    def __init__(self, module: nn.Module) -> None:
        self.routers = [part for part in module.modules() if hasattr(part, "dropped_tokens")]

    def add_to(self, sums: Tensor) -> None:
        """Add what the last forward dropped and chose to two numbers."""
        for router in self.routers:
            dropped: Tensor | None = getattr(router, "dropped_tokens", None)
            sums[1] += getattr(router, "routed_tokens", 0)
            if dropped is not None:
                sums[0] += dropped
