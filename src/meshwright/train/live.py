"""What each rank says about itself while a run goes on: one small file a rank, for `meshwright watch`.

Written at most once a second, beside the step and never waited for. The share of waiting comes from the rank's last sampled step.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from meshwright.core.codec import write_whole
from meshwright.core.live import RankState

if TYPE_CHECKING:
    from meshwright.runtime.watch import Sample
    from meshwright.train.folder import RunFolder

LEAST_SECONDS = 1.0
"""Between two writes."""


class LiveFile:
    """One rank's file."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.rank = rank
        self.path = folder.live / f"rank-{rank:05d}.json"
        self.next_write = 0.0

    def write(self, step: int, seconds: float, memory_bytes: int, sample: Sample | None) -> None:
        """A disk that is full loses a line on a screen, not the run."""
        now = time.monotonic()
        if now < self.next_write:
            return
        self.next_write = now + LEAST_SECONDS
        state = RankState(
            rank=self.rank,
            step=step,
            seconds=seconds,
            memory_bytes=memory_bytes,
            peak_bytes=sample.memory_bytes.total if sample else None,
            waiting_share=_waiting_share(sample) if sample else None,
            at=time.time(),
        )
        with suppress(OSError):
            write_whole(self.path, state.to_json())


def _waiting_share(sample: Sample) -> float:
    """Of the compute stream's time."""
    parts = [part for part in sample.part_seconds if part.stream == "compute"]
    total = sum(part.seconds for part in parts)
    return sum(part.seconds for part in parts if part.part == "waiting") / total if total else 0.0
