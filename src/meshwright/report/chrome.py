"""The sampled step of all ranks as a Chrome trace: what ui.perfetto.dev and chrome://tracing open.

One process a rank, one thread a stream (and axis), one counter track for memory by category. Each rank's step lies where the
host's clock said it began, so that all ranks share one clock; without that, all begin at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from meshwright.core.run.trace import Interval, Trace
from meshwright.report.words import MEMORY_WORDS

MICRO = 1e6
STREAMS = ("compute", "communication", "transfer")


def chrome_trace(traces: Sequence[Trace]) -> str:
    """JSON of the Trace Event Format; times in microseconds since the first rank's step began."""
    starts = [trace.sampled_at for trace in traces]
    known = [start for start in starts if start is not None]
    events: list[dict[str, Any]] = []
    for trace, start in zip(traces, starts, strict=True):
        shift = start - min(known) if start is not None and len(known) == len(traces) else 0.0
        events += _rank_events(trace, shift)
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}).decode()


def _rank_events(trace: Trace, shift: float) -> Iterator[dict[str, Any]]:
    rank = trace.rank
    yield _named("process_name", rank, 0, f"rank {rank}")
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    lanes = list(dict.fromkeys(sorted(((_lane(one)) for one in trace.timeline), key=_order)))
    for number, lane in enumerate(lanes):
        yield _named("thread_name", rank, number, lane)
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": number, "args": {"sort_index": number}}
    for one in trace.timeline:
        yield {
            "name": one.part.replace("_", " "),
            "cat": one.stream,
            "ph": "X",
            "pid": rank,
            "tid": lanes.index(_lane(one)),
            "ts": (one.start_seconds + shift) * MICRO,
            "dur": one.seconds * MICRO,
            "args": {"bytes": one.num_bytes} if one.num_bytes is not None else {},
        }
    for point in trace.memory_over_time:
        sizes = msgspec.structs.asdict(point.memory_bytes)
        yield {
            "name": "memory, bytes",
            "ph": "C",
            "pid": rank,
            "ts": (point.at_seconds + shift) * MICRO,
            "args": {words: sizes[part] for part, words in MEMORY_WORDS.items()},
        }


def _lane(one: Interval) -> str:
    return f"{one.stream} along {one.axis}" if one.axis else one.stream


def _order(lane: str) -> tuple[int, str]:
    return STREAMS.index(lane.split()[0]), lane


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
