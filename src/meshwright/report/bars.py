"""The timeline of a step as bars, one row a coordinate or stream. Neighbours that no eye could part are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.core.run.trace import Interval
from meshwright.report.run import Run
from meshwright.report.straggler import sampled_seconds

FINEST = 2000
"""A bar shorter than this part of the step cannot be seen."""
MOST_BARS = 100_000
"""Of a page: with many ranks each has fewer, so that the page stays small."""
STREAMS = 3


def planned_rows(run: Run) -> list[dict[str, Any]]:
    if run.forecast is None:
        return []
    rows = []
    for coordinate, work in enumerate(run.forecast.work):
        rows.append(
            {
                "name": f"predicted pp {coordinate}" if run.plan.mesh.pp > 1 else "predicted",
                "measured": False,
                "end": run.forecast.step_seconds,
                "start": [short(one.start_seconds) for one in work],
                "seconds": [short(one.end_seconds - one.start_seconds) for one in work],
                "part": [one.kind for one in work],
                "stage": [one.stage for one in work],
                "microbatch": [one.microbatch for one in work],
            }
        )
    return rows


def measured_rows(run: Run) -> list[dict[str, Any]]:
    """Each rank's compute stream, and below it what it communicates and copies."""
    rows = []
    finest = min(FINEST, max(1, MOST_BARS // (STREAMS * max(1, len(run.traces)))))
    for trace in run.traces:
        end = sampled_seconds(trace)
        for stream, words in (
            ("compute", f"rank {trace.rank}"),
            ("communication", ".. communication"),
            ("transfer", ".. copies"),
        ):
            bars = _visible([one for one in trace.timeline if one.stream == stream], end, finest)
            if bars:
                rows.append(_row(words, bars, end))
    return rows


def _row(name: str, bars: Sequence[Interval], end: float) -> dict[str, Any]:
    row = {
        "name": name,
        "measured": True,
        "end": end,
        "start": [short(one.start_seconds) for one in bars],
        "seconds": [short(one.seconds) for one in bars],
        "part": [_part(one) for one in bars],
    }
    if any(one.num_bytes for one in bars):
        row["bytes"] = [one.num_bytes or 0 for one in bars]
    return row


def _part(one: Interval) -> str:
    return f"{one.part} along {one.axis}" if one.axis else one.part


def _visible(intervals: Sequence[Interval], end: float, most: int) -> list[Interval]:
    """Intervals in order, about `most` at most; neighbours of one part are one where no eye could part them."""
    ordered = sorted(intervals, key=lambda interval: interval.start_seconds)
    found = _joined(ordered, end / FINEST)
    return found if len(found) <= most else _joined(_coarse(found, end / most), end / most)


def _joined(intervals: Sequence[Interval], finest: float) -> list[Interval]:
    found: list[Interval] = []
    for one in intervals:
        last = found[-1] if found else None
        if last and (last.part, last.axis) == (one.part, one.axis) and one.start_seconds - _end(last) < finest:
            joined = (last.num_bytes or 0) + (one.num_bytes or 0)
            seconds = max(_end(last), _end(one)) - last.start_seconds
            found[-1] = msgspec.structs.replace(last, seconds=seconds, num_bytes=joined or None)
        else:
            found.append(one)
    return found


def _coarse(intervals: Sequence[Interval], finest: float) -> list[Interval]:
    """Of intervals that begin in the same stretch of time, the longest, with the bytes of all."""
    stretches: dict[int, list[Interval]] = {}
    for one in intervals:
        stretches.setdefault(int(one.start_seconds / finest), []).append(one)
    found = []
    for group in stretches.values():
        longest = max(group, key=lambda one: one.seconds)
        seconds = max(_end(one) for one in group) - group[0].start_seconds
        num_bytes = sum(one.num_bytes or 0 for one in group)
        changes = {"start_seconds": group[0].start_seconds, "seconds": seconds, "num_bytes": num_bytes or None}
        found.append(msgspec.structs.replace(longest, **changes))
    return found


def _end(interval: Interval) -> float:
    return interval.start_seconds + interval.seconds


def short(number: float) -> float:
    """Six digits: more than a picture can show."""
    return float(f"{number:.6g}")
