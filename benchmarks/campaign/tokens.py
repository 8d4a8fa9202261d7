"""Data of the runs that faults are put upon: tokens at random, slow enough for a fault to meet a step, and an error on SIGUSR1."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset

NUM_SAMPLES, SEQUENCE, VOCABULARY = 512, 8, 64
SAMPLE_SECONDS = 0.005


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, SEQUENCE + 1), generator=random)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SAMPLE_SECONDS)
        return self.tokens[index, :-1], self.tokens[index, 1:]


def slowly() -> tuple[Tokens, Tokens]:
    """For training and for validation."""
    if "RANK" in os.environ:
        signal.signal(signal.SIGUSR1, _fail)
    return Tokens(1), Tokens(2)


def _fail(number: int, frame: FrameType | None) -> NoReturn:
    raise ArithmeticError("the gears slipped")
