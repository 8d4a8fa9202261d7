"""A RankState: what one rank of a running job says about itself."""

from __future__ import annotations

from typing import Literal

from meshwright.core.codec import Value


class RankState(Value, kw_only=True):
    format: Literal[1] = 1
    rank: int
    step: int
    """The last one that is done."""
    seconds: float
    """It took."""
    memory_bytes: int
    """In use now: the allocator's on a GPU, the process's on a CPU."""
    peak_bytes: int | None = None
    """Of its last sampled step."""
    waiting_share: float | None = None
    """Of its last sampled step, that it waited for others. Who waits least is whom the others wait for."""
    at: float
    """Seconds since 1970 when it said so."""
