"""When memory is fullest: the moment of the sampled step, beside the one that was predicted.

Two moments of a step may be almost equally full. Where the peak falls on another one than predicted, its categories differ while
its total agrees: the words say which moments are compared.
"""

from __future__ import annotations

from meshwright.core.run.trace import MemoryPoint, Trace
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.run import Run


def fullest_words(run: Run) -> str:
    """One sentence; nothing where neither is known."""
    trace, estimate = run.worst, run.estimate
    words = []
    if trace is not None and trace.memory_over_time:
        peak = fullest(trace)
        words.append(
            f"fullest: {format_bytes(peak.memory_bytes.total)} on rank {trace.rank}, {format_seconds(peak.at_seconds)} into the "
            f"sampled step ({part_at(trace, peak.at_seconds)})"
        )
    if estimate.worst_moment:
        words.append(
            f"predicted: {format_bytes(estimate.peak_bytes)} on rank {estimate.worst_rank} in {estimate.worst_moment}"
        )
    return "; ".join(words)


def fullest(trace: Trace) -> MemoryPoint:
    return max(trace.memory_over_time, key=lambda point: point.memory_bytes.total)


def part_at(trace: Trace, at: float) -> str:
    """What the compute stream does at a moment of the sampled step."""
    for one in trace.timeline:
        if one.stream == "compute" and one.start_seconds <= at < one.start_seconds + one.seconds:
            return one.part
    return "between two parts"
