"""What each rank says about itself while a run goes on: small files, for `meshwright watch`.

Its state is written at most once a second, and what it saw of a sampled step after that step; nobody waits for either. The share
of waiting comes from the rank's last sampled step.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from meshwright.core.codec import write_whole
from meshwright.core.run.fault import RankState

if TYPE_CHECKING:
    from meshwright.core.run.trace import Trace
    from meshwright.runtime.watch import Sample
    from meshwright.training.folder import RunFolder

LEAST_SECONDS = 1.0
"""Between two writes."""


class LiveFile:
    """One rank's files."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.rank = rank
        self.path = folder.live / f"rank-{rank:05d}.json"
        self.sample_path = folder.live / f"sample-{rank:05d}.json"
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

    def write_sample(self, trace: Trace) -> None:
        """The trace so far, without its steps: these are in metrics.jsonl."""
        with suppress(OSError):
            write_whole(self.sample_path, msgspec.structs.replace(trace, steps=()).to_json())


def _waiting_share(sample: Sample) -> float:
    """Of the compute stream's time."""
    parts = [part for part in sample.part_seconds if part.stream == "compute"]
    total = sum(part.seconds for part in parts)
    return sum(part.seconds for part in parts if part.part == "waiting") / total if total else 0.0
