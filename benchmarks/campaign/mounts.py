"""File systems of the campaign's own: small disks that can be filled, folders that can be made read-only, an empty /dev/shm.

They are mounted in a mount namespace of this process and of those it starts, so that nobody else sees them and none outlives them.
All of it needs root on Linux; `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEW_MOUNTS = 0x20000
"""CLONE_NEWNS."""
FULL = "fill"
"""The file that takes all room of a disk."""
DISK_BYTES = 32 << 20
PIECE_BYTES = 1 << 16


def make_private() -> str:
    """Mounts from now on are this process's own, and shared memory is empty. Returns why not; empty where it is so."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "unshare") or library.unshare(NEW_MOUNTS):
        return f"file systems of its own cannot be mounted: {os.strerror(ctypes.get_errno())}"
    return _run("mount", "--make-rprivate", "/") or _run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")


def mount_disk(folder: Path) -> None:
    folder.mkdir()
    _check(_run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)))


def unmount(folder: Path) -> None:
    _run("umount", "-l", str(folder))


def fill(disk: Path) -> None:
    """Until it takes no byte more."""
    handle = os.open(disk / FULL, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = PIECE_BYTES
        while size:
            try:
                os.write(handle, bytes(size))
            except OSError:
                size //= 2
    finally:
        os.close(handle)


def empty(disk: Path) -> None:
    with suppress(FileNotFoundError):
        (disk / FULL).unlink()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Whoever opens a file there from now on. Modes of files would not keep root from writing."""
    _check(_run("mount", "--bind", str(disk), str(disk)))
    try:
        _check(_run("mount", "-o", "remount,bind,ro", str(disk)))
        yield
    finally:
        unmount(disk)


def _run(*command: str) -> str:
    """What it said when it failed."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stderr.strip() or f"exit code {ended.returncode}" if ended.returncode else ""


def _check(problem: str) -> None:
    if problem:
        raise OSError(problem)
