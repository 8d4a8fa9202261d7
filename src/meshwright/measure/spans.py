"""Spans asked by time: which of them is around a moment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from meshwright.measure.profile import Span


class Spans:
    """Spans that lie side by side or inside each other, as calls of one thread do."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._starts = [span.start for span in self._spans]
        self._reach: list[float] = []
        """The latest end so far: before a span that nothing earlier reaches, the search is over."""
        for span in self._spans:
            self._reach.append(max(span.end, self._reach[-1] if self._reach else span.end))

    def around(self, at: float) -> Span | None:
        """The innermost span around a moment."""
        index = bisect_right(self._starts, at) - 1
        while index >= 0 and self._reach[index] >= at:
            if self._spans[index].end >= at:
                return self._spans[index]
            index -= 1
        return None


def by_thread(spans: Iterable[Span]) -> dict[object, Spans]:
    found: dict[object, list[Span]] = {}
    for span in spans:
        found.setdefault(span.thread, []).append(span)
    return {thread: Spans(own) for thread, own in found.items()}
