"""A RankState: what one rank of a running job says about itself."""

from __future__ import annotations

from typing import Literal

from meshwright.core.bounds import CountOrZero, NotNegative, Number
from meshwright.core.codec import Value


class RankState(Value, kw_only=True):
    """What one rank of a running job says about itself."""

    format: Literal[1] = 1
    rank: CountOrZero
    step: CountOrZero
    """The last one that is done."""
    seconds: NotNegative
    """It took."""
    memory_bytes: CountOrZero
    """In use now: the allocator's on a GPU, the process's on a CPU."""
    peak_bytes: CountOrZero | None = None
    """Of its last sampled step."""
    waiting_share: NotNegative | None = None
    """Of its last sampled step, that it waited for others. Who waits least is whom the others wait for."""
    at: Number
    """Seconds since 1970 when it said so."""
