"""Where measured clusters, captured graphs and compiled kernels are kept from one command to the next."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from meshwright.core.bounds import LARGEST_RECORD_BYTES
from meshwright.core.codec import T, write_whole
from meshwright.core.errors import InputError
from meshwright.core.files.given_file import read_given


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def content_of(path: Path) -> str:
    """A text file, as part of what a cached answer depends on; empty where it cannot be read."""
    try:
        return read_given(path, LARGEST_RECORD_BYTES)
    except InputError:
        return ""


def version_of(package: str) -> str:
    """Empty where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def read_kept(path: Path, kind: type[T]) -> T | None:
    """What was kept; None where nothing is, or it was cut short or written by another hand: it is then made again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def keep(path: Path, value: object) -> None:
    """A cache that cannot be written is not worth failing for."""
    with suppress(OSError, InputError):
        write_whole(path, msgspec.json.encode(value).decode())
