"""What a user's function draws: the same numbers in every process that calls it, or none where nobody asks for values."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

LARGEST = 2**32
"""Seeds of numpy are below."""


_weights_matter: ContextVar[bool] = ContextVar("weights_matter", default=True)


@contextmanager
def only_looked_at() -> Iterator[None]:
    """Modules built inside are followed for a plan and dropped: deferred ones (runtime/deferred.py) draw no weights."""
    before = _weights_matter.set(False)
    try:
        yield
    finally:
        _weights_matter.reset(before)


def weights_matter() -> bool:
    return _weights_matter.get()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's generators of the CPU begin at the seed, and are afterwards as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with seeded_like_torch():
            yield


@contextmanager
def seeded_like_torch() -> Iterator[None]:
    """Python's and numpy's begin at the seed that torch's was given, and are afterwards as they were."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    seed_like_torch()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def seed_like_torch() -> None:
    """Python's and numpy's generators begin at the seed that torch's was given: ranks that hold parts of one model must draw alike
    where a forward draws its way."""
    seed, numpy = torch.initial_seed() % LARGEST, sys.modules.get("numpy")
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
