"""The traces of all ranks, as a run leaves them."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.run.trace import Trace
from meshwright.training.folder import RunFolder


def worst_trace(traces: Sequence[Trace]) -> Trace:
    """The trace of the rank with the highest peak; the same on all ranks."""
    return max(traces, key=lambda trace: (trace.peak_bytes or 0, -trace.rank))


def save_traces(traces: Sequence[Trace], folder: RunFolder) -> None:
    """One file a rank; those of an earlier run on more ranks go."""
    folder.traces.mkdir(exist_ok=True)
    for old in folder.traces.glob("rank-*.json"):
        old.unlink()
    for trace in traces:
        trace.save(folder.trace_of(trace.rank))
