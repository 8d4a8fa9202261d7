"""Files that are on the disk when they are said to be, with their size and checksum known.

Every write, flush and rename of a checkpoint goes through here, and the renames of state that is kept on disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from meshwright.core.bounds import CountOrZero
from meshwright.core.codec import Value

PIECE_BYTES = 8 << 20
"""Written and summed up at a time: others get their turn in between."""


class FileFacts(Value, kw_only=True):
    """Size and checksum of a file that was written: a file with others is not that file."""

    size_bytes: CountOrZero
    checksum: str
    """CRC-32 of all of it, eight hex digits."""


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileFacts:
    """Write a new file and wait until the disk has it."""
    size, checksum = 0, 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for part in parts:
            whole = memoryview(part)
            for start in range(0, len(whole), PIECE_BYTES):
                piece = whole[start : start + PIECE_BYTES]
                checksum = zlib.crc32(piece, checksum)
                size += len(piece)
                while piece:  # a disk that is nearly full takes a part, and says so at the next one
                    piece = piece[os.write(handle, piece) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileFacts(size_bytes=size, checksum=f"{checksum:08x}")


def read_facts(path: Path) -> FileFacts:
    """Size and checksum of a file as it is now."""
    size, checksum = 0, 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
            size += len(piece)
    return FileFacts(size_bytes=size, checksum=f"{checksum:08x}")


def rename(source: Path, target: Path) -> None:
    """The new name is on the disk when this returns."""
    os.rename(source, target)
    flush_folder(target.parent)


def free_name(path: Path) -> Path:
    """The path itself, or with the first number behind it that is free."""
    number, found = 0, path
    while found.exists() or found.is_symlink():
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found


def flush_folder(folder: Path) -> None:
    """The names of its files are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
