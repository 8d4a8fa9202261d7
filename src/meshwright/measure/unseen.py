"""Deaths that the profiler did not see.

A tensor that a collective used dies in a thread of the communication backend, when that thread drops its reference last. The
profiler does not follow it there. On a busy core this happens often, and the tensor would seem to live until its address is
used again. What is known about such tensors:

    a copy that a backend makes for a collective    is gone when the collective is
    what was passed to a collective                 is gone when the collective is: had the step held it longer, it would have died
                                                    in a thread that is followed
    what fully_shard gathers into                   is gone when it is unpacked; in forward, when the next group is
    what fully_shard reduces from                   is gone before the next group is reduced
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from meshwright.measure.allocations import Allocation
from meshwright.measure.profile import Profile, Span
from meshwright.measure.running import running_collectives
from meshwright.measure.spans import Spans, by_thread

GATHER, UNPACK = "FSDP::all_gather", "FSDP::all_gather_copy_out"
REDUCE, REDUCED = "FSDP::post_backward_reduce", "FSDP::post_backward_rs_wait"


def end_unseen(allocations: Iterable[Allocation], profile: Profile) -> list[Allocation]:
    """The same allocations, each dead by the time it was of no more use."""
    ends = _Ends(profile)
    return [replace(one, died=min([one.died, *ends.of(one)])) for one in allocations]


class _Ends:
    """When allocations of one profile are of no more use."""

    def __init__(self, profile: Profile) -> None:
        self.copying = by_thread((*profile.calls, *profile.backends))
        self.backend_ends = sorted(span.end for span in profile.backends)
        self.gathers, self.unpacks, self.reduces, self.reduced = (
            sorted((span for span in profile.annotations if _name(span) == name), key=lambda span: span.start)
            for name in (GATHER, UNPACK, REDUCE, REDUCED)
        )
        self.forwards = [span for span in profile.regions if span.name == "forward"]
        self.calls = Spans(profile.calls)
        self.ends_of_calls = {one.called: one.span.end for one in running_collectives(profile)}
        self.passed: dict[int, list[Span]] = {}
        for note in profile.notes:
            category, _, place = note.name.partition("/")
            if category == "passed":
                self.passed.setdefault(int(place), []).append(note)

    def of(self, allocation: Allocation) -> list[float]:
        """None or one."""
        copying = self.copying.get(allocation.thread)
        if copying is not None and copying.around(allocation.born):
            return self.backend_ends[bisect_right(self.backend_ends, allocation.born) :][:1]
        if allocation.death_seen:
            return []
        for gather in self.gathers:
            if _around(gather, allocation):
                in_forward = any(_around(span, allocation) for span in self.forwards)
                return self._unpacked(gather)[in_forward:][:1]
        if any(_around(span, allocation) for span in self.reduces):
            return [span.end for span in self.reduced if span.start > allocation.born][:1]
        return self._last_passed(allocation)

    def _last_passed(self, allocation: Allocation) -> list[float]:
        """The end of the last collective that used it, where that is known."""
        used = [
            note for note in self.passed.get(allocation.address, ()) if allocation.born <= note.start < allocation.died
        ]
        call = self.calls.around(used[-1].start) if used else None
        end = self.ends_of_calls.get(call.start) if call else None
        return [] if end is None else [end]

    def _unpacked(self, gather: Span) -> list[float]:
        """Ends of the unpacking of one gathered group, and of all groups after it."""
        name = UNPACK + gather.name.removeprefix(GATHER)
        later = [span for span in self.unpacks if span.end > gather.end]
        own = next((number for number, span in enumerate(later) if span.name == name), len(later))
        return [span.end for span in later[own:]]


def _name(span: Span) -> str:
    return span.name.partition(" (")[0]


def _around(span: Span, allocation: Allocation) -> bool:
    return span.start <= allocation.born <= span.end
