"""Collectives as they run: gloo's threads, NCCL's kernels, each with the call it came from.

A backend names what runs, but neither axis nor bytes. Calls of one kind begin to run in the order in which they were made, so
that what runs belongs to the first call before it, of a kind it may come from, that has none yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from meshwright.core.axes import Axis
from meshwright.core.collective import CollectiveKind
from meshwright.measure.profile import Profile, Span

RUNS_AS: tuple[tuple[str, tuple[CollectiveKind, ...]], ...] = (
    ("all_reduce", ("all_reduce", "reduce_scatter")),  # gloo reduces all and keeps a part
    ("allreduce", ("all_reduce",)),
    ("all_gather", ("all_gather",)),
    ("allgather", ("all_gather",)),
    ("reduce_scatter", ("reduce_scatter",)),
    ("reducescatter", ("reduce_scatter",)),
    ("broadcast", ("broadcast",)),
    ("all_to_all", ("all_to_all",)),
    ("sendrecv", ("all_to_all",)),
    ("reduce", ("reduce",)),
    ("gather", ("gather",)),
    ("scatter", ("scatter",)),
)
"""Part of a backend's name for what runs, in small letters → the kinds of call it may come from. The first match counts."""


@dataclass(frozen=True)
class Running:
    """A collective while it runs. Without axis and bytes where no call was seen."""

    span: Span
    kind: CollectiveKind
    called: float
    axis: Axis | None = None
    num_bytes: int | None = None


def running_collectives(profile: Profile) -> list[Running]:
    """In the order in which they were launched."""
    named = [span for span in profile.annotations if span.name.startswith("gloo:") and kinds_of(span)]
    kernels = [span for span in profile.device_work if is_collective(span)]
    open_calls = list(profile.calls)
    found = []
    for span in sorted([*kernels, *named], key=lambda span: span.launched):
        kinds = kinds_of(span)
        call = next((c for c in open_calls if c.name.split("/")[0] in kinds and c.start <= span.launched), None)
        if call is None:
            found.append(Running(span, kinds[0], span.launched))
            continue
        open_calls.remove(call)
        kind, axis, num_bytes = call.name.split("/")
        found.append(Running(span, cast(CollectiveKind, kind), call.start, cast(Axis, axis), int(num_bytes)))
    return found


def is_collective(span: Span) -> bool:
    """Whether a kernel is one of NCCL's that move data."""
    return span.name.startswith("nccl") and bool(kinds_of(span))


def kinds_of(span: Span) -> tuple[CollectiveKind, ...]:
    name = span.name.partition("(")[0].lower()
    return next((kinds for part, kinds in RUNS_AS if part in name), ())
