"""What ranks of a running job say: each its state (RankState), and where one fails, a Fault: what, when, and whether to start again
may help."""

from __future__ import annotations

from typing import Literal

from meshwright.core.bounds import CountOrZero, NotNegative, Number
from meshwright.core.codec import Value

FaultKind = Literal["killed", "hung", "lost", "raised", "corrupt", "refused"]
"""killed: ended by a signal. hung: others waited for it in vain. lost: its connection to others broke. raised: an error of the
model, the data or torch. corrupt: its parameters are not those of the others. refused: what Meshwright raises on purpose."""
PASSING: tuple[FaultKind, ...] = ("killed", "hung", "lost", "raised", "corrupt")
"""Kinds that may not come again when the run goes on from its last checkpoint."""


class Fault(Value, kw_only=True):
    """What went wrong with which rank, when, and in which words."""

    kind: FaultKind
    ranks: tuple[int, ...]
    num_ranks: int
    host: str
    step: int | None = None
    """As far as somebody could say: none before the first step."""
    collective: str | None = None
    """The last one that the rank, or those that lost it, called."""
    words: str
    """What a person is told."""

    @property
    def may_pass(self) -> bool:
        return self.kind in PASSING

    @property
    def place(self) -> str:
        """Host, step and last collective, on one line."""
        step = "before the first step" if self.step is None else f"step {self.step}"
        last = "no collective yet" if self.collective is None else f"last collective: {self.collective}"
        return f"host {self.host}, {step}, {last}"

    def is_again(self, earlier: Fault | None) -> bool:
        """Whether an error of the program came back where it was before: then it is not a fault of the moment."""
        if earlier is None or self.kind != "raised":
            return False
        return (self.kind, self.step, self.headline) == (earlier.kind, earlier.step, earlier.headline)

    @property
    def headline(self) -> str:
        return self.words.partition("\n")[0]


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
