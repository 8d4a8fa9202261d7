"""Why a run ends before its last step: Ctrl-C, SIGTERM, or its time is up. One rank's wish; ranks stop together (`loop.py`)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopWish:
    """max_seconds: how long the run may take from now on; None for as long as it takes."""

    def __init__(self, max_seconds: float | None) -> None:
        self.num_signals = 0
        self._ends_at = None if max_seconds is None else time.monotonic() + max_seconds

    def is_there(self) -> bool:
        return self.num_signals > 0 or (self._ends_at is not None and time.monotonic() > self._ends_at)

    @property
    def reason(self) -> str:
        return "interrupted" if self.num_signals else "its time is up (max_seconds)"

    @contextmanager
    def heed_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run within two steps, once all ranks know, with a checkpoint."""

        def interrupt(*_: Any) -> None:
            self.num_signals += 1

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
