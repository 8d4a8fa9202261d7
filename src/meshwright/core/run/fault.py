"""The state of each rank of a running job (RankState), and a Fault where one fails: its kind, its step, and whether a restart may
help."""

from __future__ import annotations

from typing import Literal

from meshwright.core.bounds import CountOrZero, NotNegative, Number
from meshwright.core.codec import Value

FaultKind = Literal["killed", "hung", "lost", "raised", "corrupt", "refused"]
"""killed: ended by a signal. hung: others waited for it in vain. lost: its connection to others broke. raised: an error of the
model, the data or torch. corrupt: its parameters differ from the other ranks'. refused: what Meshwright raises on purpose."""
PASSING: tuple[FaultKind, ...] = ("killed", "hung", "lost", "raised", "corrupt")
"""Transient kinds: they may not recur when the run restarts from its last checkpoint."""


class Fault(Value, kw_only=True):
    """A failure of some ranks: its kind, its step and its message."""

    kind: FaultKind
    ranks: tuple[int, ...]
    num_ranks: int
    host: str
    step: int | None = None
    """The step at which it happened, as far as it is known; None before the first step."""
    collective: str | None = None
    """The last collective that the rank called, or that the ranks that lost it called."""
    words: str
    """The message for the user."""

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
    """The state of one rank of a running job."""

    format: Literal[1] = 1
    rank: CountOrZero
    step: CountOrZero
    """The last finished step."""
    seconds: NotNegative
    """Seconds of that step."""
    memory_bytes: CountOrZero
    """Memory in use now: the allocator's on a GPU, the process's on a CPU."""
    peak_bytes: CountOrZero | None = None
    """Peak of its last sampled step."""
    waiting_share: NotNegative | None = None
    """Share of its last sampled step in which it waited for others. The rank that waits least is the one the others wait for."""
    at: Number
    """Time of the report, in seconds since 1970."""
