"""A Profile: one step as torch's profiler saw it, in seconds since the step began.

The profiler's exported trace is the one public form that holds allocations, host ops, kernels and named ranges on one
clock. What the recorder itself learns while the step runs is put on the same clock as ranges with speaking names:

    meshwright/forward, recompute, backward, update, step      a region of the step; waiting: for what another stage sends
    meshwright/weights                                         a backward that makes the gradients of weights that were put off
    meshwright/note/CATEGORY/ADDRESS                           memory at this address is of this category; passed: used in a call
    meshwright/call/KIND/AXIS/BYTES                            a collective is called

Kernels and copies carry the correlation number of the host call that launched them: what a kernel was for is what the host
did then, however late the device comes to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.runtime.temporary import temporary_folder

MICRO = 1e-6
LAUNCHES = ("cuda_runtime", "cuda_driver")
BACKENDS = ("gloo:", "nccl:")
MESSAGES = ("gloo:send", "gloo:recv", "nccl:send", "nccl:recv")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Arguments(msgspec.Struct):
    """The arguments of an event that are read here; torch versions differ in the others."""

    device_type: Any = msgspec.field(name="Device Type", default=None)
    num_bytes: Any = msgspec.field(name="Bytes", default=None)
    address: Any = msgspec.field(name="Addr", default=None)
    order: Any = msgspec.field(name="Ev Idx", default=0)
    copied_bytes: Any = msgspec.field(name="bytes", default=None)
    correlation: Any = None


class Event(msgspec.Struct):
    """One entry of the exported trace; times in microseconds."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: Any = None
    args: Arguments = msgspec.field(default_factory=Arguments)


class _File(msgspec.Struct):
    """A Chrome trace, as far as it is read."""

    events: list[Event] = msgspec.field(name="traceEvents")


@dataclass(frozen=True)
class Span:
    """Something that ran from `start` to `end`; `launched` is when the host asked for it."""

    name: str
    start: float
    end: float
    launched: float
    thread: Any = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class Change:
    """Memory taken (bytes > 0) or given back (bytes < 0)."""

    at: float
    address: int
    num_bytes: int
    thread: Any


@dataclass(frozen=True)
class Profile:
    seconds: float
    """Of the step, on the host."""
    regions: tuple[Span, ...]
    notes: tuple[Span, ...]
    """Without the prefix: `CATEGORY/ADDRESS`."""
    calls: tuple[Span, ...]
    """Without the prefix: `KIND/AXIS/BYTES`."""
    annotations: tuple[Span, ...]
    """Ranges that others named: torch's fully_shard, the communication backends."""
    ops: tuple[Span, ...]
    """Host ops on the thread that runs the step."""
    device_work: tuple[Span, ...]
    """Kernels and copies; none on a CPU."""
    changes: tuple[Change, ...]
    """On the device the step runs on, in order."""
    weights: tuple[Span, ...] = ()
    """Backwards for weights alone, where a schedule puts them off."""

    @property
    def backends(self) -> tuple[Span, ...]:
        """Collectives as the threads of a communication backend run them (gloo), or queue them (NCCL). Not sends and receives:
        they last until someone waits for them, and the thread that began one goes on with other work."""
        return tuple(span for span in self.annotations if span.name.startswith(BACKENDS) and span.name not in MESSAGES)


@contextmanager
def profiled(device: torch.device) -> Iterator[profile]:
    """torch's profiler; it announces its start and end on standard error, which nobody asked for."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    profiler = profile(activities=activities, profile_memory=True, record_shapes=False)
    with _no_standard_error():
        profiler.start()
    try:
        yield profiler
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        with _no_standard_error():
            profiler.stop()


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Python and C++ alike write to file 2: for a moment it leads nowhere."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def read(profiler: profile, device: torch.device) -> Profile | None:
    """None where the disk has no room for it, and cut it off somewhere: a run does not end for that."""
    try:
        with temporary_folder() as folder:
            path = folder / "trace.json"
            with _no_standard_error():
                profiler.export_chrome_trace(str(path))
            return parse(path.read_bytes(), device.type)
    except (OSError, msgspec.DecodeError):
        return None


def parse(text: bytes, device_type: str) -> Profile:
    """An exported trace → Profile. A name in it may hold bytes that are no text."""
    events = msgspec.json.decode(text.decode("utf-8", errors="replace"), type=_File).events
    (step,) = (event for event in events if event.name == "meshwright/step" and event.cat == "user_annotation")
    by_category: dict[str, list[Event]] = {}
    for event in events:
        by_category.setdefault(event.cat, []).append(event)
    named = [_span(event, step) for event in by_category.get("user_annotation", []) if event.ts > step.ts]
    launches = {event.args.correlation: event.ts for category in LAUNCHES for event in by_category.get(category, [])}
    work = [event for category in DEVICE_WORK for event in by_category.get(category, [])]
    return Profile(
        seconds=step.dur * MICRO,
        regions=_under(named, "meshwright/", ("forward", "recompute", "backward", "update", "waiting")),
        notes=_under(named, "meshwright/note/"),
        calls=_under(named, "meshwright/call/"),
        annotations=tuple(span for span in named if not span.name.startswith("meshwright/")),
        ops=tuple(_span(event, step) for event in by_category.get("cpu_op", []) if event.tid == step.tid),
        device_work=_in_order(_span(event, step, launches.get(event.args.correlation)) for event in work),
        changes=_changes(events, step, 1 if device_type == "cuda" else 0),
        weights=_under(named, "meshwright/", ("weights",)),
    )


def _span(event: Event, step: Event, launched: float | None = None) -> Span:
    start = (event.ts - step.ts) * MICRO
    return Span(
        name=event.name,
        start=start,
        end=start + event.dur * MICRO,
        launched=start if launched is None else (launched - step.ts) * MICRO,
        thread=event.tid,
        num_bytes=event.args.copied_bytes,
    )


def _under(spans: Iterable[Span], prefix: str, names: tuple[str, ...] = ()) -> tuple[Span, ...]:
    """Spans below a prefix, their names without it; with `names`, these alone."""
    found = (span for span in spans if span.name.startswith(prefix))
    bare = (Span(span.name.removeprefix(prefix), span.start, span.end, span.launched, span.thread) for span in found)
    return _in_order(span for span in bare if not names or span.name in names)


def _in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start, -span.end)))


def _changes(events: list[Event], step: Event, device_type: int) -> tuple[Change, ...]:
    found = [event for event in events if event.name == "[memory]" and event.args.device_type == device_type]
    found.sort(key=lambda event: (event.ts, event.args.order))
    return tuple(
        Change((event.ts - step.ts) * MICRO, event.args.address, event.args.num_bytes, event.tid) for event in found
    )
