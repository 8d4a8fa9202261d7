"""Communication that compute hides, and communication it waits for, of one rank's sampled step.

exposed = what the compute stream spends waiting while the collective runs; hidden = the rest of the collective's time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.core.run.trace import Interval, Trace
from meshwright.core.units import format_seconds


def overlap(trace: Trace) -> list[dict[str, Any]]:
    """Two rows an axis: the seconds compute waits, and those it hides."""
    waits = [one for one in trace.timeline if one.stream == "compute" and one.part == "waiting"]
    calls: dict[str, list[Interval]] = {}
    for one in trace.timeline:
        if one.stream == "communication":
            calls.setdefault(one.axis or "unnamed", []).append(one)
    rows = []
    for axis, found in sorted(calls.items()):
        total = sum(one.seconds for one in found)
        exposed = min(total, sum(shared_seconds(one, waits) for one in found))
        more = f"{len(found)} collectives run {format_seconds(total)} in all"
        for name, seconds in ((f"{axis}: compute waits", exposed), (f"{axis}: hidden", total - exposed)):
            rows.append({"name": name, "predicted": None, "measured": seconds, "more": more})
    return rows


def exposed_share(trace: Trace) -> float | None:
    """Of the time collectives run, what compute waits; None where nothing was communicated."""
    calls = [one for one in trace.timeline if one.stream == "communication"]
    waits = [one for one in trace.timeline if one.stream == "compute" and one.part == "waiting"]
    total = sum(one.seconds for one in calls)
    return min(1.0, sum(shared_seconds(one, waits) for one in calls) / total) if total else None


def shared_seconds(one: Interval, others: Sequence[Interval]) -> float:
    """How long an interval runs at the same time as some of the others, which do not overlap each other."""
    end = one.start_seconds + one.seconds
    return sum(
        max(0.0, min(end, other.start_seconds + other.seconds) - max(one.start_seconds, other.start_seconds))
        for other in others
    )
