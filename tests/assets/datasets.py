"""Data as a user would give it: `tests/assets/datasets.py:loader` and others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

LENGTH = 10


class Numbers(Dataset[dict[str, Tensor]]):
    """Sample i is the number i."""

    worker = -1
    """Of the process that loads."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "x": torch.tensor([float(self.first + index)]),
            "labels": torch.tensor(index),
            "worker": torch.tensor(self.worker),
        }


def doubled(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: 2 * torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class Batches:
    """Global batches of four, the same at every pass."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for start in range(0, 12, 4):
            numbers = torch.arange(start, start + 4)
            yield {"x": numbers[:, None].float(), "labels": numbers}


def dataset() -> Numbers:
    return Numbers()


def both() -> tuple[Numbers, Numbers]:
    return Numbers(), Numbers(first=100)


def loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=4, collate_fn=doubled)


def shuffled_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True)


def odd_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=3)


def dropping_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=4, drop_last=True)


def small_loader() -> DataLoader[dict[str, Tensor]]:
    """Of the last three samples, fewer than a batch."""
    return DataLoader(Subset(Numbers(), [7, 8, 9]), batch_size=4, drop_last=True)


def seeded_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7))


def started(worker: int) -> None:
    Numbers.worker = worker


def worked_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, worker_init_fn=started, prefetch_factor=3)


def weighted_loader() -> DataLoader[dict[str, Tensor]]:
    """A sampler with a mind of its own, that draws from torch's own generator."""
    return DataLoader(Numbers(), batch_size=4, sampler=WeightedRandomSampler(torch.ones(LENGTH), 8), drop_last=True)


def replacing_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True, num_samples=8))


def distributed_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=0))


def no_samples() -> list[Tensor]:
    return []


def iterable() -> Batches:
    return Batches()


class Nothing:
    """Can be iterated again and again, and never yields."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(())


def nothing() -> Nothing:
    return Nothing()


def read_once() -> Iterator[dict[str, Tensor]]:
    return iter([{"x": torch.ones(8, 2)}])


def number() -> int:
    return 7


def fails() -> None:
    raise OSError("the shelf is empty")
