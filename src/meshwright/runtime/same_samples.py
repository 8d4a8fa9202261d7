"""Whether ranks that divide one model were given the same samples.

The ranks of one dp coordinate (its tp, cp and pp ranks) run one model together, and each reads its batch by itself. A loader that
shuffles without a common seed gives each of them another batch: every collective fits, and the loss means nothing. So checksums of
batches are compared at steps 1, 2, 4, 8 …: at once, and now and then, for loaders that drift apart.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from meshwright.core.axes import RANK_AXES
from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.runtime._torch import tree_leaves
from meshwright.runtime.messages.exchange import all_ranks


class SameSamples:
    def __init__(self, plan: Plan, replica: int) -> None:
        """replica: this rank's dp coordinate."""
        self.plan, self.replica = plan, replica
        self.num_batches = 0

    def check(self, batch: Any) -> None:
        """On every rank, with the samples it was given. Raises InputError on all ranks where two of them differ."""
        self.num_batches += 1
        if self.plan.world == self.plan.mesh.dp or self.num_batches.bit_count() > 1:
            return
        first: dict[int, tuple[int, int]] = {}
        for rank, (replica, found) in enumerate(all_ranks((self.replica, checksum(batch)), tuple[int, int])):
            known = first.setdefault(replica, (rank, found))
            if known[1] != found:
                raise InputError(self._words(known[0], rank))

    def _words(self, one: int, other: int) -> str:
        axes = [axis for axis in RANK_AXES if axis != "dp" and axis in self.plan.mesh.used]
        return (
            f"ranks {one} and {other} were given different samples in batch {self.num_batches}, but they run one model together "
            f"({', '.join(axes)}) and need the same ones: make the data in the same order on all ranks (torch.manual_seed with one "
            "number before the DataLoader, or a generator of its own with that seed), and give other samples only to other dp "
            "coordinates"
        )


def checksum(batch: Any) -> int:
    """Of every tensor's shape and bytes."""
    found = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            found = zlib.crc32(repr((tuple(leaf.shape), leaf.dtype)).encode(), found)
            found = zlib.crc32(_bytes_of(leaf), found)
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
