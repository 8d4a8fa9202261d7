"""Streams of global batches with a cursor that can be saved.

Global batch t holds the same samples whatever the number of ranks and microbatches: the stream is one endless sequence of
sample numbers, a fresh permutation each epoch, drawn from (seed, epoch) alone. The cursor counts samples, so that it stays
right when the batch size changes. A rank takes its slice of each global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright.core.errors import InputError
from meshwright.models.objective import Batch, num_samples, slice_batch
from meshwright.train.samples import Samples


@dataclass(frozen=True)
class Slice:
    """A rank's part of every global batch."""

    coordinate: int
    degree: int

    def of(self, global_batch: int) -> tuple[int, int]:
        own = global_batch // self.degree
        return self.coordinate * own, (self.coordinate + 1) * own


class Stream(Protocol):
    cursor: int

    def next(self) -> Batch: ...

    def seek(self, cursor: int) -> None: ...


class IndexedStream:
    """Samples that can be asked for by number: each rank loads only its own."""

    def __init__(self, samples: Samples, global_batch: int, part: Slice, seed: int, shuffle: bool) -> None:
        self.samples, self.global_batch, self.part = samples, global_batch, part
        self.seed, self.shuffle = seed, shuffle
        self.cursor = 0
        self._epoch = -1
        self._order: list[int] = []

    def next(self) -> Batch:
        start, stop = self.part.of(self.global_batch)
        numbers = [self.number(self.cursor + offset) for offset in range(start, stop)]
        self.cursor += self.global_batch
        return self.samples.batch(numbers)

    def seek(self, cursor: int) -> None:
        self.cursor = cursor

    def number(self, position: int) -> int:
        """The sample at a position of the endless sequence."""
        epoch, place = divmod(position, len(self.samples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.permutation(epoch)
        return self._order[place]

    def permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.samples)))
        digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()  # generators look at 32 bits only
        random = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        return torch.randperm(len(self.samples), generator=random).tolist()


class IterableStream:
    """The user's iterable of whole global batches: each rank reads all of it and keeps its slice."""

    def __init__(self, batches: Iterable[Batch], global_batch: int, part: Slice) -> None:
        self.batches, self.global_batch, self.part = batches, global_batch, part
        self.cursor = 0
        self._iterator: Iterator[Batch] = iter(batches)

    def next(self) -> Batch:
        batch = self._read()
        if num_samples(batch) != self.global_batch:
            raise InputError(
                f"the data function yields batches of {num_samples(batch)} samples, but the global batch is {self.global_batch}: "
                "yield whole global batches, or return a map-style dataset"
            )
        self.cursor += self.global_batch
        return slice_batch(batch, *self.part.of(self.global_batch))

    def seek(self, cursor: int) -> None:
        """Read past what was consumed: an iterable cannot jump."""
        self._iterator = iter(self.batches)
        self.cursor = 0
        while self.cursor < cursor:
            self.next()

    def _read(self) -> Batch:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.batches)
        try:
            return next(self._iterator)
        except StopIteration:
            raise InputError("the data function yields no batch") from None
