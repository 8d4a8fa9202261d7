"""What a split weight reads under sequence parallel is kept for backward as this rank's tokens, and gathered again there.

    forward    x (tokens of this rank) → all-gather → matmuls of the weights that read it
    backward   x → all-gather → gradients of those weights, once for all of them

The gathered tensor would else be kept whole on every rank, which is the memory that sequence parallel is to save.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.runtime import selective
from meshwright.runtime._torch import _top_saved_tensors_default_hooks
from meshwright.runtime.split import exchange
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Cut, storage_key

KEPT = "_meshwright_kept"


def gathered_again(part: Tensor, ranks: Ranks, cut: Cut) -> Tensor:
    """The whole tensor, read by parts, which knows how to be made again."""
    whole = exchange.gather(part, ranks, cut, read_by_parts=True)
    vars(whole)[KEPT] = _Kept(part.detach(), ranks, cut)
    return whole


def was_gathered(whole: Tensor) -> bool:
    """Whether backward already adds up the gradients of all that read it."""
    return KEPT in vars(whole)


class _Kept:
    """Gathers a part again when backward first asks for it; forgets it when the last that read it has."""

    def __init__(self, part: Tensor, ranks: Ranks, cut: Cut) -> None:
        self.part, self.ranks, self.cut = part, ranks, cut
        self.readers = 0
        self.whole: Tensor | None = None

    def give(self) -> Tensor:
        if self.whole is None:
            self.whole = self.ranks.gather(self.part, self.cut).contiguous()
        found = self.whole
        self.readers -= 1
        if self.readers == 0:
            self.whole = None
        return found


def _is_recomputed() -> bool:
    """Inside a block that is redone nothing is kept before backward, and there the tensor is at hand."""
    hooks = _top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[1] is not selective.unpack


class keeping_parts:  # noqa: N801 - used like a function, in `with`
    """While a function runs that reads a gathered tensor: where autograd saves that, the part is saved in its place."""

    def __init__(self, gathered: Tensor) -> None:
        self.gathered: Tensor | None = gathered
        self.kept: _Kept | None = vars(gathered).get(KEPT) if isinstance(gathered, Tensor) else None
        if self.kept is not None and _is_recomputed():
            self.kept = None
        self.hooks: Any = None

    def __enter__(self) -> None:
        if self.kept is not None:
            self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self.hooks.__enter__()

    def __exit__(self, *details: Any) -> None:
        if self.hooks is not None:
            self.hooks.__exit__(*details)
        self.gathered = None  # what is saved holds the hooks, and these hold this

    def _pack(self, tensor: Tensor) -> Any:
        assert self.kept is not None
        assert self.gathered is not None
        if not _is_all_of(self.gathered, tensor):
            return tensor
        self.kept.readers += 1
        return self.kept, tensor.shape, tensor.stride()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, shape, strides = packed  # a product may save its operand turned
        found: Tensor = kept.give().as_strided(shape, strides)
        return found


def _is_all_of(whole: Tensor, tensor: Tensor) -> bool:
    """Whether one is the other, in whatever order of dims."""
    is_there = storage_key(tensor) == storage_key(whole) and tensor.numel() == whole.numel()
    return is_there and whole.is_contiguous() and tensor.storage_offset() == whole.storage_offset()
