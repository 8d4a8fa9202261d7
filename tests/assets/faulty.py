"""Data in which two samples of one batch are bad, and a model that fails when it is told to from outside."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 5

BAD_SAMPLE = 243
"""Of the 31st global batch of eight."""
NUM_SAMPLES = 800


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, factor: float) -> None:
        random = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_SAMPLES, 3, generator=random)
        self.labels = torch.randint(CLASSES, (NUM_SAMPLES,), generator=random)
        self.x[BAD_SAMPLE] *= factor
        self.x[BAD_SAMPLE + 1] = self.x[BAD_SAMPLE]  # with another label, so that no model is right about both
        self.labels[BAD_SAMPLE + 1] = (self.labels[BAD_SAMPLE] + 1) % CLASSES

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.labels[index]


def example(samples: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, generator=random), torch.randint(CLASSES, (samples,), generator=random)


def with_nan() -> Samples:
    return Samples(float("nan"))


def with_spike() -> Samples:
    return Samples(1e5)


def good() -> Samples:
    return Samples(1.0)


def pair() -> tuple[Samples, Samples]:
    """For training and for validation."""
    return Samples(1.0), Samples(1.0)


class Linear(nn.Module):
    """Without a norm, so that a large input makes a large loss."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(x)


def linear() -> tuple[nn.Module, Any]:
    return Linear(), example(64)


def _fail(number: int, frame: FrameType | None) -> NoReturn:
    raise ArithmeticError("the gears slipped")


class Told(nn.Sequential):
    """Raises on SIGUSR1; slow enough for a signal to meet it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        if "RANK" in os.environ:
            time.sleep(0.02)
        output: Tensor = super().forward(x)
        return output


def told() -> tuple[nn.Module, Any]:
    if "RANK" in os.environ:
        signal.signal(signal.SIGUSR1, _fail)
    return Told(), example(64)


class DiesInASave(Told):
    """Rank 1 is killed when its state is asked for: the others plan the checkpoint with it."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict(*arguments, **options)


def dies_in_a_save() -> tuple[nn.Module, Any]:
    return DiesInASave(), example(64)
