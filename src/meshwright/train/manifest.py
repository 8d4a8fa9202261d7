"""The manifest of a checkpoint: size and checksum of every file in it. A folder without one is no checkpoint.

Checksums are CRC-32: they are for disks and networks that lose bits, not against someone who means harm, who could write the
manifest too (nothing in a checkpoint is ever run; see docs/decisions/0027).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from meshwright.core.codec import Value
from meshwright.core.disk import FileFacts, read_facts
from meshwright.core.errors import CheckpointError, InputError

FILE = "manifest.json"
FORMAT = 2
PlainName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]


class Manifest(Value, kw_only=True):
    format: Literal[2] = 2
    files: dict[PlainName, FileFacts]


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written: an older one may be."""


def read_manifest(folder: Path) -> Manifest:
    """Of another version: refused as such. Torn: damaged."""
    path = folder / FILE
    try:
        return Manifest.load(path)
    except InputError as error:
        if ": format: " in str(error):
            raise CheckpointError(f"{error}; read it with the version of Meshwright that wrote it") from error
        raise DamagedError(str(error)) from error


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Some of the files, byte by byte."""
    for name in names:
        path, expected = folder / name, manifest.files[name]
        if path.is_symlink() or not path.is_file():
            raise DamagedError(f"{path} is gone")
        found = path.stat().st_size
        if found != expected.size_bytes:
            raise DamagedError(f"{path} has {found} bytes, and had {expected.size_bytes} when it was written")
        checksum = read_facts(path).checksum
        if checksum != expected.checksum:
            raise DamagedError(f"{path} has checksum {checksum}, and had {expected.checksum} when it was written")
