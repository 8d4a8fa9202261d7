"""Where measured clusters, captured graphs and compiled kernels are kept from one command to the next."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meshwright.core.bounds import LARGEST_RECORD_BYTES
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
