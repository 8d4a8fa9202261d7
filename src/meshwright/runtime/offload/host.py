"""Memory of the host that a device can copy to and from while it computes, or that lies in a file.

One piece is taken for all that is kept there, so that nothing is lost to rounding (torch's own pinned allocator rounds every
tensor up to a power of two), refused before it is taken where the host has less, and given back when it is closed.

Memory in a file is on disk but for what is in use: the kernel reads ahead of a pass over it and writes what it has left behind.
The file has no name from the moment it is mapped: no crash leaves anything of it that could be taken for state.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from meshwright.core.errors import InfeasibleError
from meshwright.core.units import format_bytes
from meshwright.runtime.host_memory import available_bytes
from meshwright.runtime.offload.disk_store import check_room

ALIGNMENT = 4096
"""Every tensor begins on a page: copies and vector instructions run at full speed."""


class HostMemory:
    """A stretch of host memory that tensors are cut from, one after the other."""

    def __init__(self, num_bytes: int, device: torch.device, what: str, num_ranks_here: int = 1) -> None:
        """what: what it is for, in words. num_ranks_here: how many ranks of this host take as much."""
        self._check(num_bytes * num_ranks_here, what)
        self.num_bytes, self.device = num_bytes, device
        self._map = self._mapped()
        self._all: Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
        self._taken = 0
        self._is_pinned = False
        if device.type == "cuda" and num_bytes:
            self._pin(self._all)

    def _mapped(self) -> mmap.mmap:
        found = mmap.mmap(-1, max(self.num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            found.madvise(mmap.MADV_HUGEPAGE)
        return found

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next piece, as zeros."""
        assert self._all is not None, "the memory was given back"
        start = padded(self._taken)
        end = start + num_elements * dtype.itemsize
        if end > self._all.numel():
            raise MemoryError(
                f"{format_bytes(end)} of host memory are needed, but {format_bytes(self.num_bytes)} were taken"
            )
        self._taken = end
        return self._all[start:end].view(dtype)

    def has_room(self, num_elements: int, dtype: torch.dtype) -> bool:
        return self._all is not None and padded(self._taken) + num_elements * dtype.itemsize <= self._all.numel()

    def close(self) -> None:
        """Give it back: tensors cut from it must not be used any more."""
        if self._is_pinned and self._all is not None:
            torch.cuda.cudart().cudaHostUnregister(self._all.data_ptr())
        self._is_pinned, self._all = False, None

    def __del__(self) -> None:
        if getattr(self, "_is_pinned", False):
            self.close()

    def _check(self, num_bytes: int, what: str) -> None:
        check_host_memory(num_bytes, what)

    def _pin(self, memory: Tensor) -> None:
        memory.zero_()  # touched by many threads before the driver touches it with one
        with torch.cuda.device(self.device):
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(status) != 0:
            raise InfeasibleError(
                f"the driver could not pin {format_bytes(memory.numel())} of host memory (CUDA error {int(status)}): raise the "
                "limit of locked memory (ulimit -l), or offload a smaller share"
            )
        self._is_pinned = True


class FileMemory(HostMemory):
    """The same in a file."""

    def __init__(self, num_bytes: int, folder: Path, what: str, num_ranks_here: int = 1) -> None:
        self.folder = folder
        super().__init__(num_bytes, torch.device("cpu"), what, num_ranks_here)

    def _check(self, num_bytes: int, what: str) -> None:
        check_room(self.folder, num_bytes, what)

    def _mapped(self) -> mmap.mmap:
        size = max(self.num_bytes, 1)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a page that finds no room would end the process
            found = mmap.mmap(file.fileno(), size)
        found.madvise(mmap.MADV_SEQUENTIAL)
        return found


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def check_host_memory(needed: int, what: str) -> None:
    """Refused while nothing is taken yet."""
    available = available_bytes()
    if available is not None and needed > available:
        raise InfeasibleError(
            f"{what} needs {format_bytes(needed)} of host memory, but {format_bytes(available)} are available: offload a smaller "
            "share, spread over more hosts, or keep it on disk"
        )
