"""The timeline of a step: a Profile → intervals by stream and part.

On a CPU the host's thread is the compute stream: it is in a region of the step, or it waits. On a GPU the compute stream is
its kernels, each of the region in which the host launched it.

    waiting    a collective runs, and ends, while the compute stream stands still: it goes on when the collective is done.
               A pause that ends before the collective does had another reason, such as Python between two ops

A wait belongs to the region in which the collective was called: an all-gather of forward is waited for in forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from meshwright.core.axes import Axis
from meshwright.core.estimate import TimeParts
from meshwright.core.run.trace import Interval, Part, PartSeconds, Stream
from meshwright.measure.profile import Profile, Span
from meshwright.measure.running import is_collective, running_collectives
from meshwright.measure.spans import Spans

LEAST_WAIT = 20e-6
"""A collective that ends in a shorter pause has hardly kept anyone waiting."""
AROUND_OPS = ("autograd::", "torch::autograd", "c10d::")
"""Names of host ranges that are no work of their own: a wait may lie inside them."""
CLOSED_GAP = 50e-6
"""Gaps between kernels of one part shorter than this are not drawn."""


@dataclass(frozen=True)
class Stretch:
    """A stretch of the compute stream. `region`: of the step, also where the stretch is a wait."""

    start: float
    end: float
    part: Part
    region: Part


class Timeline:
    """Made for one profile: its streams, as intervals and as sums."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._regions = Spans(profile.regions)
        self.collectives = running_collectives(profile)
        kernels = [span for span in profile.device_work if not is_collective(span) and not _transfer(span)]
        self.compute = self._device_stream(kernels) if profile.device_work else self._host_stream()

    def intervals(self) -> tuple[Interval, ...]:
        found = [
            Interval(stream="compute", part=s.part, start_seconds=s.start, seconds=s.end - s.start)
            for s in closed(self.compute)
        ]
        found += [_interval("communication", one.kind, one.span, one.axis, one.num_bytes) for one in self.collectives]
        found += [_interval("transfer", part, span, None, span.num_bytes) for part, span in self._transfers()]
        return tuple(sorted(found, key=lambda interval: (interval.start_seconds, interval.stream)))

    def part_seconds(self) -> tuple[PartSeconds, ...]:
        sums: dict[tuple[Stream, Part, Axis | None], list[float]] = {}
        for stretch in self.compute:
            sums.setdefault(("compute", stretch.part, None), []).append(stretch.end - stretch.start)
        for one in self.collectives:
            sums.setdefault(("communication", one.kind, one.axis), []).append(one.span.end - one.span.start)
        for part, span in self._transfers():
            sums.setdefault(("transfer", part, None), []).append(span.end - span.start)
        return tuple(
            PartSeconds(stream=stream, part=part, axis=axis, seconds=sum(each), count=len(each))
            for (stream, part, axis), each in sums.items()
        )

    def time_parts(self) -> TimeParts:
        """The compute stream's seconds. Waiting counts by the region of the collective it was for."""
        sums: dict[tuple[Part, bool], float] = {}
        for stretch in self.compute:
            key = (stretch.region, stretch.part == "waiting")
            sums[key] = sums.get(key, 0.0) + stretch.end - stretch.start
        return TimeParts(
            forward=sums.get(("forward", False), 0.0),
            recompute=sums.get(("recompute", False), 0.0),
            backward=sums.get(("backward", False), 0.0),
            update=sums.get(("update", False), 0.0),
            exposed_gather=sums.get(("forward", True), 0.0),
            exposed_reduce=sums.get(("backward", True), 0.0) + sums.get(("recompute", True), 0.0),
            other=sums.get(("update", True), 0.0),
        )

    def _host_stream(self) -> list[Stretch]:
        """Regions of the step's thread, with waits cut out of them."""
        whole = Span("other", 0.0, self.profile.seconds, 0.0)
        busy = union(span for span in self.profile.ops if _is_work(span))
        outer = [span for span in self.profile.regions if span.name != "recompute"]
        inner = [span for span in self.profile.regions if span.name == "recompute"]
        return paint([[whole], outer, inner, self._waits(busy)])

    def _device_stream(self, kernels: Sequence[Span]) -> list[Stretch]:
        """Kernels by the region that launched them, and waits between them."""
        layers: dict[str, list[Span]] = {}
        for span in kernels:
            layers.setdefault(self._region_at(span.launched), []).append(span)
        named = [[Span(name, start, end, start) for start, end in union(spans)] for name, spans in layers.items()]
        return paint([*named, self._waits(union(kernels))])

    def _waits(self, busy: list[tuple[float, float]]) -> list[Span]:
        """Pauses that a collective ends; named after the region that called it."""
        pauses = [(end, start) for (_, end), (start, _) in pairwise([(0.0, 0.0), *busy])]
        starts = [start for start, _ in pauses]
        found = []
        for one in self.collectives if pauses else ():
            start, goes_on = pauses[bisect_right(starts, one.span.end) - 1]
            begin, end = max(start, one.span.start), one.span.end
            if end - begin >= LEAST_WAIT and end <= goes_on:
                region = self._region_at(one.called)
                found.append(Span(f"waiting/{region}", begin, end, begin))
        return found

    def _region_at(self, at: float) -> str:
        """The innermost region around a moment of the host; 'other' outside all."""
        region = self._regions.around(at)
        return region.name if region else "other"

    def _transfers(self) -> list[tuple[Part, Span]]:
        named = ((_transfer(span), span) for span in self.profile.device_work)
        return [(part, span) for part, span in named if part is not None]


def _is_work(span: Span) -> bool:
    """Ops have a namespace (`aten::mm`); the nodes of autograd around them have none."""
    return "::" in span.name and not span.name.startswith(AROUND_OPS)


def _transfer(span: Span) -> Part | None:
    if "HtoD" in span.name:
        return "host_to_device"
    return "device_to_host" if "DtoH" in span.name else None


def _interval(stream: Stream, part: Part, span: Span, axis: Axis | None, num_bytes: int | None) -> Interval:
    return Interval(
        stream=stream, part=part, start_seconds=span.start, seconds=span.end - span.start, axis=axis,
        num_bytes=num_bytes,
    )  # fmt: skip


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Stretches covered by at least one of the spans."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def paint(layers: Sequence[Sequence[Span]]) -> list[Stretch]:
    """Spans on top of each other → stretches side by side: a later layer hides an earlier one."""
    edges = sorted({edge for layer in layers for span in layer for edge in (span.start, span.end)})
    index = {edge: number for number, edge in enumerate(edges)}
    names: list[str | None] = [None] * len(edges)
    for layer in layers:
        for span in layer:
            for number in range(index[span.start], index[span.end]):
                names[number] = span.name
    found: list[Stretch] = []
    for (start, end), name in zip(pairwise(edges), names, strict=False):
        if name is not None:
            part, _, region = name.partition("/")
            found.append(Stretch(start, end, cast(Part, part), cast(Part, region or part)))
    return _joined(found, 0.0)


def closed(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The same, with short gaps inside one part closed."""
    return _joined(stretches, CLOSED_GAP)


def _joined(stretches: Sequence[Stretch], gap: float) -> list[Stretch]:
    found: list[Stretch] = []
    for one in stretches:
        last = found[-1] if found else None
        if last and (last.part, last.region) == (one.part, one.region) and one.start - last.end <= gap:
            found[-1] = Stretch(last.start, one.end, one.part, one.region)
        else:
            found.append(one)
    return found
