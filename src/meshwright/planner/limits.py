"""What a question is asked about beside the plan itself: how much of the cluster, how much memory, and how to search."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.recipe import Recipe


@dataclass(frozen=True)
class Limits:
    hosts: int | None = None
    """How many, where not the cluster's own number."""
    nproc: int | None = None
    """Ranks of this machine, where it is the cluster."""
    devices: int | None = None
    """Use exactly so many."""
    memory: str | int | None = None
    """Budget per device, in bytes or as people write it; without it, all the device has."""
    search: str = "joint"
    prefer_fastest: bool = False
    """Whether the fastest plan is taken even where a simpler one is as fast within the estimate's error."""
    recipe: Recipe | None = None
    """What training adds to the model."""


NO_LIMITS = Limits()
