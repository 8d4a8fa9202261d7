"""A file that somebody hands in: read whole or line by line, if it is a plain file of a reasonable size.

A device such as /dev/zero never ends, a pipe waits for a writer that may not come, and a file of some GiB fills the memory: each is
refused before a byte of it is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from meshwright.core.bounds import LARGEST_FILE_BYTES, LARGEST_RECORD_BYTES, LONGEST_LINE_BYTES
from meshwright.core.errors import InputError, nearest
from meshwright.core.units import format_bytes

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_given(path: str | os.PathLike[str], most_bytes: int = LARGEST_FILE_BYTES, encoding: str = "utf-8") -> str:
    """The text of a file, or an `InputError` that says why it has none."""
    try:
        return read_given_bytes(path, most_bytes).decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read: not a text in UTF-8: {error}") from error


def read_given_bytes(path: str | os.PathLike[str], most_bytes: int = LARGEST_FILE_BYTES) -> bytes:
    with open_given(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)  # no more than was checked: it may grow


def given_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of an open file with their ends. Of a line that is too long only the start is kept, without an end."""
    while line := file.readline(LONGEST_LINE_BYTES):
        yield line
        while len(line) == LONGEST_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE_BYTES)


@contextmanager
def open_given(path: str | os.PathLike[str], most_bytes: int = LARGEST_RECORD_BYTES) -> Iterator[BinaryIO]:
    """A plain file of at most so many bytes, open for reading; anything else is an `InputError`."""
    source = Path(path)
    try:
        handle = os.open(source, os.O_RDONLY | os.O_NONBLOCK)  # to open a pipe without it would wait for a writer
    except FileNotFoundError:
        raise InputError(f"{source}: no such file{_sibling_hint(source)}") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise InputError(f"{source}: cannot be read: {error}") from error
    try:
        _check_plain(source, os.fstat(handle), most_bytes)
        with open(handle, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error}") from error
    finally:
        os.close(handle)


def _check_plain(path: Path, found: os.stat_result, most_bytes: int) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise InputError(f"{path}: is {_KINDS.get(kind, 'not a file')}: name a plain file")
    if found.st_size > most_bytes:
        raise InputError(
            f"{path}: has {format_bytes(found.st_size)}, a file of this kind at most {format_bytes(most_bytes)}"
        )


def _sibling_hint(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f": the folder {folder} does not exist either"
    names = [item.name for item in folder.iterdir() if item.suffix == path.suffix]
    return f": {nearest(path.name, names)}" if names else ""
