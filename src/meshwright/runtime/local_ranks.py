"""The ranks of this machine as processes: started, looked at until all have ended or one has failed, stopped.

    a template is at hand      ranks are forked from it                                     -> runtime/template.py
    else, or it was lost       each is a new Python process that loads torch for itself

One that fails has the others stopped. A signal that would end this process stops all ranks in good order first; a second one
ends them at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from meshwright.core.errors import RunError
from meshwright.runtime.host_ranks import EndedRank
from meshwright.runtime.messages.seal import KEY, new_key
from meshwright.runtime.rank import LAUNCHER
from meshwright.runtime.rendezvous import LOOPBACK, listening_store, local_only
from meshwright.runtime.template import LOG_LEVEL, RANK_LOG_LEVEL, STOPPING, template_at_hand
from meshwright.runtime.temporary import PARENT

LOOK_SECONDS = 0.05
SHUTDOWN_SECONDS = 600
"""After a signal: a last step and a checkpoint must fit in it."""
GRACE_SECONDS = 2.0
"""After the first rank failed: others that lose it, or fail of the same cause, end by themselves and leave their own words."""
FAILED_SECONDS = 30
"""For the others to end once one has failed; what they wait for may never come."""
RANK = "meshwright.runtime.rank"


@contextmanager
def heeding_signals(heed: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Those that would end this process; one that is ignored, as under nohup, stays so."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in STOPPING} if is_main else {}
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, heed)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


class LocalRanks:
    """Processes that run `meshwright.runtime.rank` with the same arguments."""

    def __init__(self, arguments: list[str], num_ranks: int, reports: Path) -> None:
        """reports: a folder where ranks that fail leave their words."""
        self.arguments, self.num_ranks, self.reports = arguments, num_ranks, reports
        self.failed: dict[int, EndedRank] = {}
        self.num_signals = 0
        """That told this process to stop."""
        self._running: dict[int, int] = {}

    def run(self) -> None:
        """Until all have ended."""
        with self._heeding_signals():
            try:
                store = listening_store(LOOPBACK, 0)
                self._start(int(store.port))
                while self._running and not self.failed and not self.num_signals:
                    self._look()
                if not self.num_signals:
                    self._wait(GRACE_SECONDS)
                self._signal(signal.SIGTERM)
                self._wait(SHUTDOWN_SECONDS if self.num_signals else FAILED_SECONDS)
            finally:
                self._kill()

    def _start(self, port: int) -> None:
        run_id, key = uuid.uuid4().hex, new_key()
        for rank in range(self.num_ranks):
            environment = rank_environment(rank, self.num_ranks, port, run_id)
            environment[KEY] = key
            environment["TORCHELASTIC_ERROR_FILE"] = str(self._report(rank))
            environment[PARENT] = str(self.reports)
            self._running[rank] = self._forked(rank, environment) or self._spawned(environment)

    def _forked(self, rank: int, environment: dict[str, str]) -> int | None:
        """None where there is nothing to fork from, or not any more: somebody may have killed it."""
        template = template_at_hand()
        if template is not None:
            with suppress(RunError):
                return template.start(f"{RANK}:main", self.arguments, environment, f"mw-rank-{rank}")
        return None

    def _spawned(self, environment: dict[str, str]) -> int:
        command = [sys.executable, "-m", RANK, *self.arguments]
        try:
            return os.posix_spawn(sys.executable, command, environment, setsid=True)
        except OSError as error:
            raise RunError(
                f"no rank could be started: {error.strerror}; make memory or processes free (ulimit -u)"
            ) from error

    def _look(self) -> None:
        """Note who has ended, or wait a little for it."""
        before = len(self._running)
        for rank, process in list(self._running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self._running[rank]
                if code := os.waitstatus_to_exitcode(status):
                    self.failed[rank] = EndedRank(code, process, str(self._report(rank)))
        if len(self._running) == before:
            time.sleep(LOOK_SECONDS)

    def _wait(self, patience_seconds: float) -> None:
        """For ranks to end; a signal ends the patience."""
        deadline, signals = time.monotonic() + patience_seconds, self.num_signals
        while self._running and time.monotonic() < deadline and self.num_signals == signals:
            self._look()

    def _kill(self) -> None:
        """Whoever is left."""
        self._signal(signal.SIGKILL)
        while self._running:
            self._look()

    def _signal(self, number: int) -> None:
        """To each rank and what it has started: a rank has a session of its own."""
        for process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process, number)

    def _report(self, rank: int) -> Path:
        return self.reports / f"error-{rank}.json"

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """Count those that would end this process."""

        def count(number: int, frame: FrameType | None) -> None:
            self.num_signals += 1

        with heeding_signals(count):
            yield


def rank_environment(rank: int, num_ranks: int, port: int, run_id: str) -> dict[str, str]:
    """What torchrun would give a rank of one host, over the environment of this process."""
    numbers = {
        "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "ROLE_NAME": "default",
        "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "ROLE_WORLD_SIZE": num_ranks, "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": run_id, LAUNCHER: os.getpid(),
    }  # fmt: skip
    wished = {LOG_LEVEL: RANK_LOG_LEVEL, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return {**wished, **os.environ, **local_only(), **{name: str(value) for name, value in numbers.items()}}
