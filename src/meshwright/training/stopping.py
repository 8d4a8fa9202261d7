"""Why a run ends before its last step: Ctrl-C, SIGTERM, a closed terminal, or its time is up.

One rank wishes to stop; all ranks stop together (`loop.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        """Ctrl-C, SIGTERM and SIGHUP end the run within two steps, once all ranks know, with a checkpoint. A signal that is
        ignored, as SIGHUP is under nohup, stays ignored."""

        def interrupt(*_: Any) -> None:
            self.num_signals += 1

        numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
