"""A file that somebody hands in: read whole or line by line, if it is a plain file of a reasonable size.

A device such as /dev/zero never ends, a pipe waits for a writer that may not come, and a file of some GiB fills the memory: each is
refused before a byte of it is read. JSON and TOML become builtins (lists, dicts, text and numbers), nested no deeper than the
limit, no key given twice.                                                                              -> parse_json, parse_toml
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from meshwright.core.bounds import (
    LARGEST_FILE_BYTES,
    LARGEST_RECORD_BYTES,
    LONGEST_LINE_BYTES,
    MOST_LETTERS,
    MOST_NESTED,
)
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
    """A plain file of at most `most_bytes`, open for reading; anything else is an `InputError`."""
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


def parse_json(text: str | bytes, where: str) -> Any:
    try:
        raw = msgspec.json.decode(text)
    except RecursionError:
        raise InputError(_too_deep(where)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    check_plain(raw, where)
    try:
        json.loads(text, object_pairs_hook=_refuse_repeated)  # msgspec would keep the last of two
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return raw


def parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        raw = tomllib.loads(text)
    except RecursionError:
        raise InputError(_too_deep(where)) from None
    except ValueError as error:  # its own error, or a number or a date that Python does not have
        raise InputError(f"{where}: not valid TOML: {error}") from error
    check_plain(raw, where)
    return raw


def check_plain(raw: object, where: str) -> None:
    """Nothing is nested too deeply, and no text is too long. Level by level: to recurse would be what it guards against."""
    level: list[object] = [raw]
    for _ in range(MOST_NESTED):
        if not level:
            return
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and len(item) > MOST_LETTERS:
                raise InputError(f"{where}: a text of {len(item)} letters: a text here has at most {MOST_LETTERS}")
        level = below
    if level:
        raise InputError(_too_deep(where))


def _too_deep(where: str) -> str:
    return f"{where}: lists and objects are nested more than {MOST_NESTED} deep: a value of this kind never is"


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InputError(f"{key}: the field is given twice: keep one of them")
        seen.add(key)
