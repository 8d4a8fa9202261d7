"""The ranks of one host as processes that someone far away looks after: start them, look how they are, stop them.

What a look returns is plain data, so that it can travel: new lines of output, and how ranks ended, with the words they left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from meshwright.runtime.rank import LAUNCHER
from meshwright.runtime.rendezvous import listening_store


@dataclass(frozen=True)
class EndedRank:
    """How a rank ended, in the form in which torch's launcher has it."""

    exitcode: int
    pid: int
    error_file: str
    timestamp: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Ending:
    """How a rank of another host ended; its report is the text of the file it left there."""

    exitcode: int
    pid: int
    report: str
    timestamp: float


@dataclass(frozen=True)
class Look:
    """What is new on a host. lines: (stream, text), stream 1 or 2."""

    lines: tuple[tuple[int, str], ...]
    endings: dict[int, Ending]


class HostRanks:
    """Ranks that were started here. One object a host, in a process of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-")
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._readers: dict[int, list[Thread]] = {}
        self._lines: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._store: Any = None

    def hold_store(self, address: str) -> int:
        """The job's store, on this address alone; returns its port."""
        self._store = listening_store(address, 0)
        return int(self._store.port)

    def start(self, function: str, payload: dict[str, Any], environments: Mapping[int, Mapping[str, str]]) -> None:
        """`package.module:function` with the payload, in a process a rank, with these variables over those of this process."""
        payload_file, result_file = Path(self._folder.name, "payload.json"), Path(self._folder.name, "result.json")
        payload_file.write_text(json.dumps(payload))
        command = ["-m", "meshwright.runtime.rank", function, str(payload_file), str(result_file)]
        for rank, variables in environments.items():
            environment = {
                **os.environ,
                **variables,
                "TORCHELASTIC_ERROR_FILE": str(self._report(rank)),
                LAUNCHER: str(os.getpid()),
            }
            process = subprocess.Popen(
                [sys.executable, *command], env=environment, text=True, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            self._processes[rank] = process
            self._readers[rank] = [
                Thread(target=self._read, args=pair, daemon=True) for pair in ((1, process.stdout), (2, process.stderr))
            ]
            for reader in self._readers[rank]:
                reader.start()

    def look(self) -> Look:
        endings = {}
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                for reader in self._readers[rank]:
                    reader.join(timeout=1.0)  # its last words are there before its end
                endings[rank] = Ending(code, process.pid, self._words(rank), time.time())
        return Look(tuple(self._new_lines()), endings)

    def stop(self, number: int = signal.SIGTERM) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def _read(self, stream: int, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._lines.put((stream, line))

    def _new_lines(self) -> list[tuple[int, str]]:
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._lines.get_nowait())
        return found

    def _report(self, rank: int) -> Path:
        return Path(self._folder.name, f"error-{rank}.json")

    def _words(self, rank: int) -> str:
        path = self._report(rank)
        return path.read_text() if path.exists() else ""
