"""The log of a trace cut into stretches: runs of entries in one block and phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from meshwright.capturing.recording import Entry, ExitEntry, MemoryEntry, OpEntry, Recording, SkipEntry
from meshwright.core.graph import Phase


@dataclass(frozen=True)
class Stretch:
    phase: Phase
    block: str
    ops: tuple[int, ...]
    """Numbers of ops of the whole trace."""
    memory: tuple[MemoryEntry, ...]
    output_bytes: int
    skipped: bool


def find_stretches(recording: Recording) -> list[Stretch]:
    """In order of execution. Gradients of parameters are left out: they belong to the parameters."""
    own = recording.gradient_storages
    entries = (entry for entry in recording.log if not (isinstance(entry, MemoryEntry) and entry.storage in own))
    runs = groupby(entries, key=lambda entry: (entry.phase, entry.block))
    found = (stretch for place, run in runs for stretch in _cut(*place, list(run)))
    return _merged(stretch for stretch in found if stretch.ops or stretch.memory or stretch.skipped)


def _cut(phase: Phase, block: str, entries: list[Entry]) -> list[Stretch]:
    """What several blocks read and this one frees is freed after it, outside: so blocks that do the same stay alike."""
    shared = [entry for entry in entries if block and isinstance(entry, MemoryEntry) and entry.shared]
    rest = [entry for entry in entries if entry not in shared] if shared else entries
    return [_stretch(phase, block, rest), _stretch(phase, "", list(shared))]


def _stretch(phase: Phase, block: str, entries: list[Entry]) -> Stretch:
    return Stretch(
        phase=phase,
        block=block,
        ops=tuple(entry.number for entry in entries if isinstance(entry, OpEntry)),
        memory=tuple(_in_order(entries)),
        output_bytes=sum(entry.output_bytes for entry in entries if isinstance(entry, ExitEntry)),
        skipped=any(isinstance(entry, SkipEntry) for entry in entries),
    )


def _in_order(entries: list[Entry]) -> Iterator[MemoryEntry]:
    """Storages that die together die in order of birth: torch frees them in no order that could be relied on."""
    relevant = (entry for entry in entries if isinstance(entry, MemoryEntry | OpEntry))
    for dying, run in groupby(relevant, key=lambda entry: isinstance(entry, MemoryEntry) and entry.num_bytes <= 0):
        memory = [entry for entry in run if isinstance(entry, MemoryEntry)]
        yield from sorted(memory, key=lambda entry: entry.storage) if dying else memory


def _merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """What only an empty stretch kept apart comes together."""
    found: list[Stretch] = []
    for stretch in stretches:
        last = found[-1] if found else None
        if last and (last.phase, last.block) == (stretch.phase, stretch.block):
            found[-1] = Stretch(
                stretch.phase, stretch.block, last.ops + stretch.ops, last.memory + stretch.memory,
                last.output_bytes + stretch.output_bytes, last.skipped or stretch.skipped,
            )  # fmt: skip
        else:
            found.append(stretch)
    return found
