"""The category of each allocation, read off what was noted about its address, and off where it was born.

In this order:

    gathered_parameters, gradients, inputs    noted by the witness while it was alive
    communication_buffers                     born in a collective, or when fully_shard packs tensors into one for it
    gathered_parameters                       born when fully_shard unpacks parameters, and alive after
    gradients                                 born when fully_shard converts a gradient, and alive after
    activations                               born in a forward, or a recompute, and alive when it ends; or born in a backward for
                                              inputs, and dead in the backward for weights that it was kept for
    temporaries                               all else

A replica's gradients lie in its buckets: these are gradients, kept from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.measure.allocations import Allocation
from meshwright.measure.profile import Profile, Span
from meshwright.measure.spans import Spans, by_thread

NOTED = ("gathered_parameters", "gradients", "inputs")
"""Where two were noted about one allocation, the first of these counts."""
PACKS = ("FSDP::all_gather", "FSDP::post_backward_reduce")
UNPACKS = ("FSDP::pre_forward", "FSDP::pre_backward")
CONVERTS = ("FSDP::post_backward_accumulate", "FSDP::post_backward_reshard")
"""Ranges that fully_shard names itself; after the name may stand the module's, in brackets."""


class Categories:
    """Made for one profile; answers for its allocations."""

    def __init__(self, profile: Profile, allocations: Iterable[Allocation]) -> None:
        self._noted = _noted(profile.notes, allocations)
        self._kept_in = Spans(span for span in profile.regions if span.name in ("forward", "recompute"))
        self._packed_in, self._unpacked_in, self._converted_in = (
            Spans(span for span in profile.annotations if span.name.partition(" (")[0] in names)
            for names in (PACKS, UNPACKS, CONVERTS)
        )
        self._backwards = Spans(span for span in profile.regions if span.name == "backward")
        self._weights = Spans(profile.weights)
        self._backends = by_thread(profile.backends)

    def of(self, allocation: Allocation) -> str:
        noted = self._noted.get(allocation, ())
        for category in NOTED:
            if category in noted:
                return category
        if self._packed_in.around(allocation.born) or self._in_backend(allocation):
            return "communication_buffers"
        if _outlives(allocation, self._unpacked_in):
            return "gathered_parameters"
        if _outlives(allocation, self._converted_in):
            return "gradients"
        return "activations" if self._is_kept(allocation) else "temporaries"

    def _is_kept(self, allocation: Allocation) -> bool:
        """For backward; or for the gradients of weights, where these are put off."""
        if _outlives(allocation, self._kept_in):
            return True
        return _outlives(allocation, self._backwards) and self._weights.around(allocation.died) is not None

    def _in_backend(self, allocation: Allocation) -> bool:
        regions = self._backends.get(allocation.thread)
        return regions is not None and regions.around(allocation.born) is not None


def _outlives(allocation: Allocation, spans: Spans) -> bool:
    """Whether it was born in one of the spans and is alive when that ends."""
    span = spans.around(allocation.born)
    return span is not None and allocation.died > span.end


def _noted(notes: Iterable[Span], allocations: Iterable[Allocation]) -> dict[Allocation, set[str]]:
    """What was noted about each allocation while it was alive: its address may have belonged to others before."""
    by_address: dict[int, list[Allocation]] = {}
    for allocation in allocations:
        by_address.setdefault(allocation.address, []).append(allocation)
    found: dict[Allocation, set[str]] = {}
    for note in notes:
        category, _, place = note.name.partition("/")
        for allocation in by_address.get(int(place), ()):
            if allocation.born <= note.start < allocation.died:
                found.setdefault(allocation, set()).add(category)
    return found
