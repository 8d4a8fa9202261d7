"""An Infeasible: nothing fits, and what a person can do about it."""

from __future__ import annotations

from meshwright.core.codec import Value
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan


class WayOut(Value, kw_only=True):
    """One change of the nearest miss, costed."""

    words: str
    """`selective recompute of blocks.0-23`."""
    plan: Plan
    estimate: Estimate
    num_hosts: int
    """Of the cluster it needs."""
    saved_bytes: int
    """Per device, against the nearest miss."""
    slower_share: float
    """Of its step; negative where it is faster."""
    leave_out: tuple[str, ...] = ()
    """Flags that fixed what it changes."""
    not_yet: tuple[str, ...] = ()
    """Parts of the plan that can be costed, but not run yet."""


class Infeasible(Value, kw_only=True):
    """Nothing fits: the plan that misses by least, which limit it breaks, and the cheapest changes that would make it fit."""

    plan: Plan
    """The nearest miss."""
    estimate: Estimate
    binding: str
    """Which limit it breaks, where, and by how much."""
    num_candidates: int
    ways_out: tuple[WayOut, ...] = ()
    """The cheapest first. Where none fits, the one that comes nearest."""
