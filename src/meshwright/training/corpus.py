"""Text that every machine has: the source files of the running Python's standard library, as bytes. Or any text files.

One token is one byte. A file belongs to the validation split when the hash of its name says so (one in twenty), so that
the split does not depend on which other files there are. Where that leaves one side empty, the last twentieth of all text
is for validation.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from meshwright.core.errors import InputError

Split = Literal["train", "validation"]

BYTE_VALUES = 256
VALIDATION_SHARE = 20
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"}
"""Folders that some distributions ship and others do not, or that are not the library's own."""
TEXT_SUFFIXES = {
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
    ".json",
    ".toml",
    ".html",
}


def read_corpus(name: str, split: Split) -> Tensor:
    """All bytes of one split, in the order of file names."""
    folder, files = _files(name)
    apart = {path for path in files if _is_validation(path.relative_to(folder))}
    if 0 < len(apart) < len(files):
        return _as_tensor(_join([path for path in files if (path in apart) == (split == "validation")]))
    text = _join(files)  # a handful of files may leave one side empty: then their text is cut, not their list
    cut = len(text) - len(text) // VALIDATION_SHARE
    return _as_tensor(text[:cut] if split == "train" else text[cut:])


def _files(name: str) -> tuple[Path, list[Path]]:
    if name == "stdlib":
        folder = Path(sysconfig.get_paths()["stdlib"])
        return folder, sorted(_walk(folder, {".py"}))
    path = Path(name.removeprefix("text:"))
    if path.is_file():
        return path.parent, [path]
    if not path.is_dir():
        raise InputError(f"data source '{name}': no such file or folder: {path}")
    files = sorted(_walk(path, TEXT_SUFFIXES))
    if not files:
        raise InputError(
            f"data source '{name}': no text files in {path} (looked for {', '.join(sorted(TEXT_SUFFIXES))})"
        )
    return path, files


def _walk(folder: Path, suffixes: set[str]) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        # not gone into: site-packages alone may hold most files
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for path in (Path(place, name) for name in files):
            if path.suffix in suffixes and path.is_file():
                yield path


def _is_validation(name: Path) -> bool:
    return int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % VALIDATION_SHARE == 0


def _join(files: list[Path]) -> bytes:
    return b"\n".join(path.read_bytes() for path in files)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
