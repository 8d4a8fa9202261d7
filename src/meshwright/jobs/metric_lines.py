"""The lines of a run's metrics.jsonl, read once: who looks again reads what was added since.

A run of weeks has a million lines, and is looked at every other second. A file that has become shorter, or begins otherwise, is
another run's, or was cut back by a resume: it is read anew. The last line of a run that goes on, or was killed, may be cut off:
it counts where it can be read, and is read again.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import Any

from meshwright.core.bounds import LONGEST_LINE_BYTES
from meshwright.core.errors import InputError
from meshwright.core.files.given_file import given_lines, open_given
from meshwright.training.metrics import parse_line

Line = dict[str, Any]


class MetricLines:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._forget()

    def read(self) -> tuple[Line, ...]:
        """All lines that are whole by now."""
        with self._lock:
            if os.path.lexists(self.path):
                self._read_on()
            else:
                self._forget()
            return (*self._found, *self._unfinished)

    def _forget(self) -> None:
        self._found: list[Line] = []
        self._unfinished: list[Line] = []
        self._last = b""
        """The last line that was read: where it lies no more, the file is another one."""
        self._end = 0

    def _read_on(self) -> None:
        with open_given(self.path) as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._forget()
                file.seek(0)
            self._unfinished = []
            for line in given_lines(file):
                self._take(line)

    def _take(self, line: bytes) -> None:
        number = len(self._found) + 1
        try:
            entry = parse_line(line)
        except InputError as error:
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES:
                return
            raise InputError(f"{self.path}, line {number}: {error}: remove the line, or train again") from None
        if not line.endswith(b"\n"):
            self._unfinished = [entry]
            return
        self._found.append(entry)
        self._last, self._end = line, self._end + len(line)
