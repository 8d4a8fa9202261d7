"""How far a search has come: for people who wait for it."""

from __future__ import annotations

from meshwright.core.codec import Value


class SearchProgress(Value, kw_only=True):
    """What a search does now, and the best plan it has found so far."""

    stage: str
    num_costed: int
    """Plans that were costed."""
    best_seconds: float | None = None
    """Step time of the fastest plan that fits, so far."""
    bound_seconds: float | None = None
    """No plan that is still open can be faster than this."""

    @property
    def gap(self) -> float | None:
        """How much slower the best plan may be than the fastest there is."""
        if self.best_seconds is None or not self.bound_seconds:
            return None
        return max(0.0, self.best_seconds / self.bound_seconds - 1)
