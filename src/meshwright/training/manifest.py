"""The manifest of a checkpoint: size and checksum of every file in it. A folder without one is no checkpoint.

Nothing is read from a checkpoint but what its manifest lists, and that only where it is a file of its own: no link, no pipe,
nothing of another folder. Other files that lie in the folder are not looked at.

Checksums are CRC-32: they are for disks and networks that lose bits, not against someone who means harm, who could write the
manifest too (nothing in a checkpoint is ever run; see docs/decisions/0027).
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from meshwright.core.codec import Value
from meshwright.core.errors import CheckpointError, InputError
from meshwright.core.files.disk import FileFacts, read_facts

FILE = "manifest.json"
FORMAT = 2
PlainName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9_.-]*\Z", max_length=255)]
"""Of a file in the checkpoint's own folder."""


class Manifest(Value, kw_only=True):
    """Size and checksum of every file of a checkpoint: `manifest.json`, written last."""

    format: Literal[2] = 2
    files: dict[PlainName, FileFacts]


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written: an older one may be."""


def read_manifest(folder: Path) -> Manifest:
    """Of another version: refused as such. Torn: damaged."""
    path = folder / FILE
    check_plain(path)
    try:
        return Manifest.load(path)
    except InputError as error:
        raise damage_of(error) from error
    except RecursionError as error:
        raise DamagedError(f"{path}: its JSON is nested too deep") from error


def damage_of(error: InputError) -> CheckpointError:
    """What a file of a checkpoint was refused for: another version's format, which no older checkpoint would mend, or damage."""
    if ": format: " in str(error):
        return CheckpointError(f"{error}; read it with the version of Meshwright that wrote it")
    return DamagedError(str(error))


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Some of the files, byte by byte."""
    for name in names:
        path, expected = folder / name, manifest.files[name]
        check_plain(path)
        _check_size(path, path.stat().st_size, expected)
        _check_sum(path, read_facts(path).checksum, expected)


def read_listed(folder: Path, manifest: Manifest, name: str) -> bytes:
    """A small file that the manifest lists, as it was written."""
    path = folder / name
    expected = manifest.files.get(name)
    if expected is None:
        raise DamagedError(f"{path} is not in {FILE}, and so is not read")
    check_plain(path)
    _check_size(path, path.stat().st_size, expected)
    text = path.read_bytes()
    _check_sum(path, f"{zlib.crc32(text):08x}", expected)
    return text


def check_plain(path: Path) -> None:
    """A link would lead to what was never written here; to open a pipe would wait for ever."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        raise DamagedError(f"{path} is gone") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be looked at: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        kinds = ((stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"))
        kind = next((word for test, word in kinds if test(mode)), "no file")
        raise DamagedError(f"{path} is {kind}, and was a file when it was written")


def _check_size(path: Path, found: int, expected: FileFacts) -> None:
    if found != expected.size_bytes:
        raise DamagedError(f"{path} has {found} bytes, and had {expected.size_bytes} when it was written")


def _check_sum(path: Path, found: str, expected: FileFacts) -> None:
    if found != expected.checksum:
        raise DamagedError(f"{path} has checksum {found}, and had {expected.checksum} when it was written")
