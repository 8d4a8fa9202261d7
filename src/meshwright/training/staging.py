"""A copy of this rank's part of a state in host memory: written from there, while training changes the original.

The memory is kept from one checkpoint to the next: to get it from the system takes as long as to fill it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.core.errors import InfeasibleError
from meshwright.runtime.host_memory import available_bytes
from meshwright.runtime.offload.host import HostMemory
from meshwright.runtime.offload.threads import ranks_here

ALIGNMENT = 64
"""Of copies, in bytes: a multiple of every item's size."""


class Staging:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: HostMemory | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def available_bytes(self) -> int | None:
        """What could be copied: what is held, or this rank's part of what the host has left."""
        free = available_bytes()
        return None if free is None else max(self._room.numel(), (free + self._held_by_all()) // ranks_here())

    def begin(self, num_bytes: int) -> None:
        """Memory for so much; the copies of before are given up."""
        self._used = 0
        if num_bytes and self._room.numel() < num_bytes:
            self.close()
            padded = num_bytes + num_bytes // 8 + (1 << 20)  # gaps between tensors; a state may grow a little
            self._memory = self._take(padded)
            self._room = self._memory.take(padded, torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        if self._used + size > self._room.numel():
            kept = torch.empty(tensor.shape, dtype=tensor.dtype)  # many tiny tensors: more gaps than there was room for
        else:
            kept = self._room[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
            self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return kept.copy_(tensor.detach(), non_blocking=self.device.type == "cuda")

    def finish(self) -> None:
        """All copies are there."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """The copies must not be used any more."""
        self._room, self._used = torch.empty(0, dtype=torch.uint8), 0
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _take(self, num_bytes: int) -> HostMemory:
        """Pinned where the device copies by itself; a driver that pins no more leaves it slower, not impossible."""
        what = "a copy of the state for a checkpoint"
        try:
            return HostMemory(num_bytes, self.device, what)
        except InfeasibleError:
            return HostMemory(num_bytes, torch.device("cpu"), what)

    def _held_by_all(self) -> int:
        return self._room.numel() * ranks_here()
