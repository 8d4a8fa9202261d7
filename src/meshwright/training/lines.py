"""A file that grows line by line, and loses none to a disk that is full for a while, nor to a folder that is moved or made anew."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 64 << 20
"""Kept in memory for a disk that takes nothing; then the oldest go."""


class LineFile:
    def __init__(self, path: Path) -> None:
        """One that cannot be opened now is tried again with every line."""
        self.path = path
        self._waiting = b""
        self._handle: int | None = None
        self._write()

    def write(self, line: str) -> None:
        """What the disk does not take waits for the next line, or for `close`."""
        self._waiting += f"{line}\n".encode()
        self._write()
        if len(self._waiting) > MOST_BYTES:
            self._waiting = self._waiting[-MOST_BYTES:].partition(b"\n")[2]

    def close(self) -> bool:
        """Returns whether every line is written."""
        self._write()
        self._let_go()
        return not self._waiting

    def _write(self) -> None:
        with suppress(OSError):
            if self._handle is not None and not self._is_at_its_path(self._handle):
                self._let_go()
            if self._handle is None:
                # a pipe in place of the file would wait for a reader
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
            while self._waiting:
                self._waiting = self._waiting[os.write(self._handle, self._waiting) :]

    def _let_go(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None

    def _is_at_its_path(self, handle: int) -> bool:
        """A file that was removed, or whose folder was moved, takes lines that nobody would find."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except OSError:
            return False
