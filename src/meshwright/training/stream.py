"""Streams of global batches with a cursor that can be saved.

Global batch t holds the same samples whatever the number of ranks and microbatches: the stream is one endless sequence of
sample numbers, a fresh permutation each epoch, drawn from (seed, epoch) alone. The cursor counts samples, so that it stays
right when the batch size changes. A rank takes its slice of each global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

import torch

from meshwright.core.errors import InputError
from meshwright.models.objective import Batch, num_samples, slice_batch
from meshwright.training.samples import Samples


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

    def __init__(
        self, samples: Samples, global_batch: int, part: Slice, seed: int, shuffle: bool, drop_last: bool = False
    ) -> None:
        """drop_last: an epoch ends with its last whole global batch; else the next epoch fills it up."""
        self.samples, self.global_batch, self.part = samples, global_batch, part
        self.seed, self.shuffle = seed, shuffle
        self.length = len(samples) - (len(samples) % global_batch if drop_last else 0)
        self.cursor = 0
        self._check(drop_last)
        self._epoch = -1
        self._order: list[int] = []

    def _check(self, drop_last: bool) -> None:
        if not len(self.samples):
            raise InputError("the data source has no samples: check what it reads, or set data.source")
        if not self.length:
            raise InputError(
                f"the data source has {len(self.samples)} samples, fewer than a global batch of {self.global_batch}, and its "
                "loader drops the last batch: leave drop_last out, or make the global batch smaller"
            )

    def next(self) -> Batch:
        numbers = self.numbers(self.cursor)
        self.cursor += self.global_batch
        return self.samples.batch(numbers)

    def numbers(self, cursor: int) -> list[int]:
        """This rank's samples of the global batch at a cursor."""
        start, stop = self.part.of(self.global_batch)
        return [self.number(cursor + offset) for offset in range(start, stop)]

    def seek(self, cursor: int) -> None:
        self.cursor = cursor

    def number(self, position: int) -> int:
        """The sample at a position of the endless sequence."""
        epoch, place = divmod(position, self.length)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.permutation(epoch)
        return self._order[place]

    def permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.samples)))
        random = torch.Generator().manual_seed(_mixed(self.seed, epoch))
        return torch.randperm(len(self.samples), generator=random).tolist()


class IterableStream:
    """The user's iterable of whole global batches: each rank reads all of it and keeps its slice.

    Ranks have random states of their own. What an iterable draws when a pass begins, such as the order of a sampler, is drawn
    from (seed, pass), so that all ranks slice the same batches.
    """

    def __init__(self, batches: Iterable[Batch], global_batch: int, part: Slice, seed: int = 0) -> None:
        self.batches, self.global_batch, self.part, self.seed = batches, global_batch, part, seed
        self.cursor = 0
        self._begin(0)

    def next(self) -> Batch:
        batch = self._read()
        if num_samples(batch) != self.global_batch:
            raise InputError(
                f"the data function yields batches of {num_samples(batch)} samples, but the global batch is {self.global_batch}: "
                "yield whole global batches (drop_last=True leaves out a smaller last one), or return a map-style dataset"
            )
        self.cursor += self.global_batch
        return slice_batch(batch, *self.part.of(self.global_batch))

    def seek(self, cursor: int) -> None:
        """Read past what was consumed: an iterable cannot jump."""
        self._begin(0)
        self.cursor = 0
        while self.cursor < cursor:
            self.next()

    def _read(self) -> Batch:
        found = next(self._iterator, None)
        if found is None:
            self._begin(self._pass + 1)
            found = next(self._iterator, None)
        if found is None:
            raise InputError("the data function yields no batch: check what it reads")
        return found

    def _begin(self, number: int) -> None:
        """Samplers draw their order with the first batch."""
        self._pass = number
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_mixed(self.seed, number))
            iterator = iter(self.batches)
            first = list(islice(iterator, 1))
        self._iterator: Iterator[Batch] = chain(first, iterator)


def _mixed(seed: int, epoch: int) -> int:
    """A seed of both; generators look at 32 bits only."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:4], "big")
