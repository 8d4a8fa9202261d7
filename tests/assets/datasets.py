"""Data as a user would give it: `tests/assets/datasets.py:loader` and others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

LENGTH = 10


class Numbers(Dataset[dict[str, Tensor]]):
    """Sample i is the number i."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([float(self.first + index)]), "labels": torch.tensor(index)}


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
    return DataLoader(Numbers(), batch_size=3, collate_fn=doubled)


def shuffled_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Numbers(), batch_size=3, shuffle=True)


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
