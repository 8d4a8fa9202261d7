"""Every storage of a trace from birth to death.

Storages are numbered in order of birth: addresses are used again, numbers are not. Parameters, buffers and the batch are
there before the step and are only known by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meshwright.capturing.groups import CannotSkip, Group
from meshwright.capturing.place import Place
from meshwright.capturing.recording import BATCH, INPUT, MemoryEntry, Recording
from meshwright.core.graph import Source


@dataclass(slots=True)
class Stored:
    """A living storage: its number, the block it was born in, and what wrote it last."""

    number: int
    block: str
    num_bytes: int
    writer: Source
    readers: set[str] = field(default_factory=set)
    """Blocks other than its own that read it."""
    death: weakref.ref[Any] | None = None


class Storages:
    def __init__(self, recording: Recording, place: Place) -> None:
        self.recording = recording
        self.place = place
        self.living: dict[int, Stored] = {}
        self.before: list[Any] = []
        """Storages that were there before. They are held: a forward may put others in their place (`self.router.to(dtype)`), and
        a new one at the address of an old one would be taken for it."""
        self.num_born = 0
        self.closed = False
        self.left_behind: dict[int, Group] = {}
        """What a representative neither returned nor kept for backward, by number: a count it notes, or the like."""
        self.gone_early: Group | None = None
        """Whose representative did not leave behind for good what it left behind."""

    def know(self, tensors: dict[str, Tensor]) -> None:
        """Tensors that were there before; of tied ones the first name counts."""
        for name, tensor in tensors.items():
            self._hold(tensor, name)

    def know_batch(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._hold(tensor, BATCH)

    def _hold(self, tensor: Tensor, name: str) -> None:
        self.living.setdefault(key_of(tensor), Stored(-1, "", storage_bytes(tensor), name))
        self.before.append(tensor.untyped_storage())

    def find(self, tensor: Tensor) -> Stored | None:
        return self.living.get(key_of(tensor))

    def read(self, tensor: Tensor, block: str) -> Source:
        """What wrote a tensor that is now read in a block."""
        stored = self.find(tensor)
        if stored is None:
            return INPUT
        if block != stored.block:
            stored.readers.add(block)
            if stored.number in self.left_behind:  # skipped blocks leave nothing that others could read
                raise CannotSkip(self.left_behind[stored.number])
        return stored.writer

    def writer(self, tensor: Tensor) -> Source:
        stored = self.find(tensor)
        return stored.writer if stored else INPUT

    def notice(self, tensors: Iterable[Tensor]) -> None:
        """Give numbers to storages not seen before, and wait for their deaths."""
        for tensor in tensors:
            key = key_of(tensor)
            if key not in self.living:
                self._watch(key, tensor)

    def written(self, tensors: Iterable[Tensor], op: int) -> None:
        for tensor in tensors:
            stored = self.living[key_of(tensor)]
            if stored.number >= 0:  # a buffer that is updated keeps its name
                stored.writer = op
                self.recording.makers.setdefault(stored.number, op)

    def born_since(self, number: int) -> set[int]:
        """Numbers of the storages born since then that are still alive."""
        return {stored.number for stored in self.living.values() if stored.number >= number}

    def note_saved(self) -> None:
        """At the end of forward: what is alive now is kept for backward, each storage for the op that made it."""
        for stored in self.living.values():
            maker = self.recording.makers.get(stored.number)
            if maker is not None:
                self.recording.ops[maker].saved_bytes += stored.num_bytes

    def close(self) -> None:
        """The step is over: what still lives, lives on."""
        self.closed = True

    def _watch(self, key: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number, num_bytes = self.num_born, storage.nbytes()
        self.num_born += 1
        stored = self.living[key] = Stored(number, self.place.last.block, num_bytes, INPUT)
        self._note(stored, num_bytes)

        def died(_: Any) -> None:
            del self.living[key]
            self._note(stored, -num_bytes)
            if number in self.left_behind and not self.closed:
                self.gone_early = self.left_behind[number]

        stored.death = weakref.ref(storage, died)

    def _note(self, stored: Stored, num_bytes: int) -> None:
        """What happens inside a skipped block is its representative's to tell."""
        block = self.place.last.block
        if num_bytes and not self.closed and block not in self.recording.representatives:
            shared = len(stored.readers) > 1 and stored.block != block
            self.recording.log.append(MemoryEntry(self.place.phase, block, stored.number, num_bytes, shared))


def key_of(tensor: Tensor) -> int:
    """The storage's address in the C++ heap: unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def stored_bytes(tensor: Tensor) -> int:
    """What a tensor covers; an expanded view covers no more than what is really stored."""
    return min(tensor.numel() * tensor.element_size(), storage_bytes(tensor))
