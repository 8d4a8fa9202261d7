"""Samples by number: text windows, synthetic images, or the user's own dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshwright.core.errors import InputError
from meshwright.models.examples import ImageShape, TextShape, text_batch
from meshwright.models.objective import Batch
from meshwright.training.corpus import BYTE_VALUES, Split, read_corpus

SYNTHETIC_IMAGES = 4096


class Samples(Protocol):
    """A finite set of samples."""

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> Batch: ...


class TextWindows:
    """Windows of `seq` tokens, one after another, with the labels of the model's task."""

    def __init__(self, tokens: Tensor, shape: TextShape, name: str) -> None:
        if shape.vocab < BYTE_VALUES:
            raise InputError(
                f"the model knows {shape.vocab} tokens, but text as bytes needs {BYTE_VALUES}: use vocab=256 or more"
            )
        self.tokens, self.shape = tokens, shape
        self.length = (len(tokens) - 1) // shape.seq
        if self.length < 1:
            raise InputError(f"data source '{name}' has {len(tokens)} bytes, fewer than one sample of {shape.seq}")

    def __len__(self) -> int:
        return self.length

    def batch(self, numbers: Sequence[int]) -> Batch:
        starts = torch.tensor(numbers)[:, None] * self.shape.seq
        windows = self.tokens[starts + torch.arange(self.shape.seq + 1)].long()
        return text_batch(windows, numbers, self.shape)


class SyntheticImages:
    """Every class has a pattern of its own, under noise: there is something to learn."""

    def __init__(self, shape: ImageShape, split: Split) -> None:
        self.shape = shape
        self.offset = 0 if split == "train" else SYNTHETIC_IMAGES
        random = torch.Generator().manual_seed(0)
        coarse = torch.randn(shape.classes, shape.channels, 4, 4, generator=random)
        self.patterns = torch.nn.functional.interpolate(coarse, size=(shape.size, shape.size))

    def __len__(self) -> int:
        return SYNTHETIC_IMAGES

    def batch(self, numbers: Sequence[int]) -> Batch:
        images = [self.image(number + self.offset) for number in numbers]
        return {
            "pixel_values": torch.stack([pixels for pixels, _ in images]),
            "labels": torch.tensor([k for _, k in images]),
        }

    def image(self, number: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(number)
        label = int(torch.randint(self.shape.classes, (1,), generator=random))
        noise = torch.randn(self.patterns.shape[1:], generator=random)
        return self.patterns[label] + noise, label


class DatasetSamples:
    """A map-style dataset of the user's, put together by the collate function of the user's loader."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        self.dataset = dataset
        self.collate = collate or default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, numbers: Sequence[int]) -> Batch:
        return self.collate([self.dataset[number] for number in numbers])


def make_text(name: str, shape: TextShape, split: Split) -> TextWindows:
    return TextWindows(read_corpus(name, split), shape, name)
