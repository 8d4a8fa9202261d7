"""Samples packed into one sequence: Hugging Face models look for them in the position ids, in every forward.

tensors without values   there is nothing to look at; a plain batch has none                     -> nothing_packed
on a GPU                 a look waits for all that the device was given, and the device then     -> looked_for_once
                         waits for the host
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

NAME = "find_packed_sequence_indices"
Find = Callable[[Tensor], Tensor | None]


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Models are told that every sample is a sequence of its own: else they would build masks that a plain batch does not need,
    and attention would take a slower path than in the real run."""
    with _replaced(lambda own: lambda position_ids: None):
        yield


class Looked:
    """Positions in which no packed samples were found."""

    def __init__(self) -> None:
        self._plain: set[tuple[Any, ...]] = set()
        self._is_in_place = False

    @contextmanager
    def looked_for_once(self) -> Iterator[None]:
        """Positions that a model makes for itself are looked at in the first step only.

        They are known by one row that stands for all samples (a stride of zero): no samples' own positions, which come from the
        host with a row for each. With a single sample nothing can be told, and every step looks. Forwards of several microbatches
        may be in it at a time; the first that leaves ends it for all, and they look as ever.
        """
        if self._is_in_place:
            yield
            return
        self._is_in_place = True
        try:
            with _replaced(lambda own: lambda position_ids: self._find(own, position_ids)):
                yield
        finally:
            self._is_in_place = False

    def _find(self, own: Find, position_ids: Tensor) -> Tensor | None:
        is_own = position_ids.dim() == 2 and position_ids.shape[0] > 1 and position_ids.stride(0) == 0
        key = (position_ids.shape, position_ids.stride(), position_ids.dtype, position_ids.device)
        if is_own and key in self._plain:
            return None
        found = own(position_ids)
        if is_own and found is None:
            self._plain.add(key)
        return found


@contextmanager
def _replaced(make: Callable[[Find], Find]) -> Iterator[None]:
    masking = sys.modules.get("transformers.masking_utils")
    own = getattr(masking, NAME, None)
    if masking is None or own is None:
        yield
        return
    setattr(masking, NAME, make(own))
    try:
        yield
    finally:
        setattr(masking, NAME, own)
