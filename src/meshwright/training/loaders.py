"""A user's DataLoader as a stream of global batches, with all that it says.

dataset, collate_fn                           as they are
shuffle or a plain order                      drawn from `seed`, or from the seed of its generator, the same for all ranks
drop_last                                     each epoch ends with its last whole global batch
batch_size                                    must be the global batch, or a rank's share of it
num_workers and what belongs to workers       each rank has its own workers, which load its share of the batches to come
pin_memory                                    batches are pinned on their way to a GPU in any case
a sampler or batch_sampler of its own         left to itself: its batches are global batches, drawn alike on every rank
DistributedSampler                            refused: it takes out a rank's share, which is done here
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from meshwright.core.errors import InputError
from meshwright.models.objective import Batch
from meshwright.training.samples import DatasetSamples
from meshwright.training.stream import IndexedStream, IterableStream, Slice, Stream


def loader_stream(name: str, loader: DataLoader[Any], global_batch: int, part: Slice, seed: int) -> Stream:
    """name: of the function that returned it."""
    if isinstance(loader.sampler, DistributedSampler) or isinstance(
        getattr(loader.batch_sampler, "sampler", None), DistributedSampler
    ):
        raise InputError(
            f"{name} returned a DataLoader with a DistributedSampler: ranks get their shares of a global batch here; leave the "
            "sampler out (shuffle=True shuffles)"
        )
    if not _draws_plainly(loader):
        return IterableStream(loader, global_batch, part, seed)
    _check_batch_size(name, loader, global_batch, part)
    if loader.generator is not None:
        seed = loader.generator.initial_seed()
    return (
        LoadedStream(loader, global_batch, part, seed)
        if loader.num_workers
        else _indexed(loader, global_batch, part, seed)
    )


def _draws_plainly(loader: DataLoader[Any]) -> bool:
    """Whether a loader draws all samples of a dataset once, in order or shuffled."""
    sampler = loader.sampler
    is_map = hasattr(loader.dataset, "__getitem__") and hasattr(loader.dataset, "__len__")
    if not is_map or loader.batch_size is None:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


def _check_batch_size(name: str, loader: DataLoader[Any], global_batch: int, part: Slice) -> None:
    share = global_batch // part.degree
    if loader.batch_size not in (global_batch, share):
        either = f"{global_batch}" if share == global_batch else f"{global_batch}, or a rank's share of {share}"
        raise InputError(
            f"{name} returned a DataLoader of batch_size={loader.batch_size}, but the plan's global batch is {either}: set "
            f"global_batch = {loader.batch_size} under [plan] (or --global-batch), give the loader that batch_size, or return the "
            "dataset itself"
        )


def _indexed(loader: DataLoader[Any], global_batch: int, part: Slice, seed: int) -> IndexedStream:
    samples = DatasetSamples(loader.dataset, loader.collate_fn)
    shuffles = isinstance(loader.sampler, RandomSampler)
    return IndexedStream(samples, global_batch, part, seed, shuffles, loader.drop_last)


class LoadedStream(IndexedStream):
    """Samples by number, loaded ahead by the loader's workers. The cursor counts what was handed out, not what is loaded."""

    def __init__(self, loader: DataLoader[Any], global_batch: int, part: Slice, seed: int) -> None:
        shuffles = isinstance(loader.sampler, RandomSampler)
        samples = DatasetSamples(loader.dataset, loader.collate_fn)
        super().__init__(samples, global_batch, part, seed, shuffles, loader.drop_last)
        self.loader = loader
        self._batches: Iterator[Batch] | None = None

    def next(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self._ahead())
        batch = next(self._batches)
        self.cursor += self.global_batch
        return batch

    def seek(self, cursor: int) -> None:
        if cursor != self.cursor:
            self._batches = None
        super().seek(cursor)

    def _ahead(self) -> DataLoader[Any]:
        """The user's loader from the cursor on; its workers draw from a generator of their own, not from the model's."""
        given = self.loader
        return DataLoader(
            given.dataset,
            batch_sampler=_Numbers(self, self.cursor),
            collate_fn=given.collate_fn,
            num_workers=given.num_workers,
            pin_memory=given.pin_memory and torch.cuda.is_available(),
            timeout=given.timeout,
            worker_init_fn=given.worker_init_fn,
            multiprocessing_context=given.multiprocessing_context,
            prefetch_factor=given.prefetch_factor,
            generator=torch.Generator().manual_seed(self.seed + self.cursor + self.part.coordinate),
        )


class _Numbers:
    """The sample numbers of this rank's share of every global batch from a cursor on, without an end."""

    def __init__(self, stream: IndexedStream, cursor: int) -> None:
        self.stream, self.cursor = stream, cursor

    def __iter__(self) -> Iterator[list[int]]:
        cursor = self.cursor
        while True:
            yield self.stream.numbers(cursor)
            cursor += self.stream.global_batch
