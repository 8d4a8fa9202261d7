"""State on disk, in two generations: while one is written, the other is whole.

    NAME.0, NAME.1     one file a generation for every named stretch of bytes, of its full size from the beginning
    manifest.json      which generation of each counts; replaced by an atomic rename when everything written is on the disk

A crash at any time leaves the manifest of the last commit, and the files it names: `reopen` finds that state, or says that there is
none. Reads and writes run in threads, in large blocks, several at a time.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import DiskError, InfeasibleError, InputError
from meshwright.core.files.disk import rename
from meshwright.core.units import format_bytes

CHUNK_BYTES = 16 * 2**20
NUM_THREADS = 4
MANIFEST = "manifest.json"
GENERATIONS = 2


class Transfer:
    """A read or write on its way."""

    def __init__(self, chunks: list[Future[None]]) -> None:
        self._chunks = chunks

    def wait(self) -> None:
        """What went wrong is raised here, when no chunk is on its way any more."""
        errors = [error for chunk in self._chunks if (error := chunk.exception()) is not None]
        if errors:
            raise errors[0]


class DiskStore:
    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """sizes: bytes by name. Room for all of it is taken now, or refused with what is needed and free."""
        check_room(folder, GENERATIONS * sum(sizes.values()))
        self._open(folder, sizes, dict.fromkeys(sizes, 0))
        (folder / MANIFEST).unlink(missing_ok=True)  # what it named is about to be written over
        try:
            for name, size in sizes.items():
                for generation in range(GENERATIONS):
                    self._allocate(name, generation, size)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def reopen(folder: Path) -> DiskStore:
        """The state of the last commit."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            sizes, generations = manifest["sizes"], manifest["generations"]
        except FileNotFoundError:
            raise InputError(f"{folder} holds no state that was written whole: start from a checkpoint") from None
        except (ValueError, KeyError) as error:
            raise InputError(f"{folder / MANIFEST} cannot be read: {error}") from error
        store = DiskStore.__new__(DiskStore)
        store._open(folder, sizes, generations)
        for name, size in sizes.items():
            path = store.path(name)
            if path.stat().st_size != size:
                raise InputError(f"{path} has {path.stat().st_size} bytes, not {size}: start from a checkpoint")
        return store

    def _open(self, folder: Path, sizes: Mapping[str, int], generations: dict[str, int]) -> None:
        self.folder, self.sizes = folder, dict(sizes)
        self._generations = generations
        self._pending: dict[str, Transfer] = {}
        self._files: dict[tuple[str, int], int] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, "disk")
        for name in sizes:
            for generation in range(GENERATIONS):
                path = folder / f"{name}.{generation}"
                self._files[name, generation] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def path(self, name: str) -> Path:
        """The file of the generation that counts."""
        return self.folder / f"{name}.{self._generations[name]}"

    def read(self, name: str, target: Tensor) -> Transfer:
        """What counts of a name, into memory of its size."""
        memory, file = _bytes_of(target), self._files[name, self._generations[name]]
        return self._transfer(name, memory, lambda start, stop: self._read(name, file, memory[start:stop], start))

    def write(self, name: str, source: Tensor) -> Transfer:
        """Into the generation that does not count yet. The memory must stay as it is until the transfer is done."""
        memory, file = _bytes_of(source), self._files[name, 1 - self._generations[name]]
        self._pending[name] = self._transfer(
            name, memory, lambda start, stop: self._write(name, file, memory[start:stop], start)
        )
        return self._pending[name]

    def commit(self, note: Any = None) -> None:
        """What was written counts, all of it at once."""
        for name, transfer in self._pending.items():
            transfer.wait()
            os.fdatasync(self._files[name, 1 - self._generations[name]])
        generations = {
            name: 1 - number if name in self._pending else number for name, number in self._generations.items()
        }
        manifest = {"format": 1, "note": note, "sizes": self.sizes, "generations": generations}
        draft = self.folder / f".{MANIFEST}.draft"
        with draft.open("w") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        rename(draft, self.folder / MANIFEST)
        self._generations, self._pending = generations, {}

    def note(self) -> Any:
        """What the last commit was given."""
        return json.loads((self.folder / MANIFEST).read_text())["note"]

    def close(self) -> None:
        """The files stay."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _transfer(self, name: str, memory: memoryview, move: Any) -> Transfer:
        if len(memory) != self.sizes[name]:
            raise ValueError(f"'{name}' has {self.sizes[name]} bytes on disk, but {len(memory)} are given")
        starts = range(0, len(memory), CHUNK_BYTES)
        return Transfer([self._threads.submit(move, start, min(start + CHUNK_BYTES, len(memory))) for start in starts])

    def _read(self, name: str, file: int, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(file, [memory[done:]], offset + done)
            if count == 0:
                raise DiskError(
                    f"{self.path(name)} ends at byte {offset + done}, but has {self.sizes[name]} by its manifest"
                )
            done += count

    def _write(self, name: str, file: int, memory: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(memory):
                done += os.pwritev(file, [memory[done:]], offset + done)
        except OSError as error:
            raise self._failed(name, len(memory) - done, error) from error

    def _allocate(self, name: str, generation: int, size: int) -> None:
        file = self._files[name, generation]
        try:
            os.ftruncate(file, size)
            if size:
                os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system without it
                raise self._failed(name, size, error) from error

    def _failed(self, name: str, needed: int, error: OSError) -> DiskError:
        free = shutil.disk_usage(self.folder).free
        return DiskError(
            f"{self.folder / name}: {error.strerror}; {format_bytes(needed)} more were needed, {format_bytes(free)} are free: free "
            "some space or give another folder; the state of the last commit is whole"
        )


def check_room(folder: Path, needed: int, what: str = "two generations of the state") -> None:
    """Refused while nothing is written yet. what: it is needed for, in words."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; make it, or name another in offload.folder")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder}: may not be written to; change its permissions, or name another in offload.folder")
    reused = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".0", ".1"))
    free = shutil.disk_usage(folder).free + reused
    if needed > free:
        raise InfeasibleError(
            f"{folder}: {format_bytes(needed)} are needed on disk, {what}, but {format_bytes(free)} are free: free some space, or "
            "name another folder in offload.folder"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array)
