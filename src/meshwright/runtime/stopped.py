"""Ranks that are stopped (SIGSTOP, a full terminal) and do not go on: seen from their launcher, and ended.

The watchdog beside the ranks speaks first, where it is up: this is for a rank that is stopped before it, while it starts, and
for one that nobody waits for. A rank that is stopped does not heed SIGTERM either: torch's launcher would wait half a minute.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

LATER_SECONDS = 20.0
"""After the time limit: the watchdog's tick, answers and report come before."""
LOOK_SECONDS = 0.5


class StoppedRanks:
    """A thread that looks at the children of this process while the block runs. timeout_seconds 0: it does nothing."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._since: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-stopped-ranks", daemon=True)

    @property
    def patience_seconds(self) -> float:
        return self.timeout_seconds + min(LATER_SECONDS, 3 * self.timeout_seconds)

    def __enter__(self) -> Self:
        if self.timeout_seconds and Path("/proc/self/stat").exists():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            now = time.monotonic()
            self._since = {process: self._since.get(process, now) for process in stopped_children()}
            for process, since in self._since.items():
                if now - since > self.patience_seconds:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)


def stopped_children() -> Iterator[int]:
    """Children of this process that a signal has stopped; one that a debugger holds is not among them."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state == "T" and int(parent) == os.getpid():
            yield int(file.parent.name)
