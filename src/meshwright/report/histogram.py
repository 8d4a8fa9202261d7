"""Steps counted by their seconds, on one scale for all runs of a comparison.

edges: NUM_BINS + 1 equally spaced, from the fastest step of all to the slowest that 98 % of them do not exceed; slower ones count
in the last bin, so that one hiccup does not flatten the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.report.run import Run, percentile

NUM_BINS = 16
LEVELS = " ▁▂▃▄▅▆▇█"


def shared_edges(runs: Sequence[Run]) -> tuple[float, ...]:
    """None where no step is known."""
    every = tuple(seconds for run in runs for seconds in run.step_seconds)
    if not every:
        return ()
    low, high = min(every), percentile(every, 0.98)
    width = ((high - low) or 0.1 * low) / NUM_BINS
    return tuple(low + place * width for place in range(NUM_BINS + 1))


def counted(seconds: Sequence[float], edges: Sequence[float]) -> tuple[int, ...]:
    """Steps of each bin."""
    counts = [0] * (len(edges) - 1)
    width = edges[1] - edges[0]
    for value in seconds:
        counts[max(0, min(len(counts) - 1, int((value - edges[0]) / width)))] += 1
    return tuple(counts)


def bars(counts: Sequence[int]) -> str:
    """A character a bin; the fullest is as high as the line, and a single step is seen."""
    most = max(counts, default=0) or 1
    return "".join(LEVELS[-(-count * (len(LEVELS) - 1) // most)] for count in counts)


def histogram_of(run: Run, edges: Sequence[float]) -> dict[str, Any] | None:
    if not edges:
        return None
    return {"edges_seconds": list(edges), "counts": list(counted(run.step_seconds, edges))}
