"""A Claim: what a search has proven about its plan, and over which plans."""

from __future__ import annotations

from meshwright.core.bounds import NotNegative
from meshwright.core.codec import Value


class Claim(Value, kw_only=True):
    """All of it holds by the estimates alone: how far these are off is another question."""

    complete: bool = False
    """Whether every plan that the flags can ask for was costed, or ruled out by a lower bound."""
    gap: NotNegative | None = None
    """No plan that was searched is faster than the one returned by more than this share; None: nothing is proven."""
    left_out: tuple[str, ...] = ()
    """Plans that were not searched, in words. The gap does not cover them."""

    @property
    def words(self) -> str:
        """As one clause: `no plan that was searched is faster by these estimates; not searched: gpipe`."""
        if self.gap is None:
            proven = "a faster plan may exist"
        else:
            which = "plan that was searched" if self.left_out else "plan"
            more = f"more than {self.gap:.1%} " if self.gap else ""
            proven = f"no {which} is {more}faster by these estimates"
        return "; ".join([proven, *([f"not searched: {', '.join(self.left_out)}"] if self.left_out else [])])
