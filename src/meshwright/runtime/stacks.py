"""Python stacks of a process: its own, and those of one that cannot answer, asked for by a signal.

A rank that is stopped, or whose native code holds the interpreter, runs no Python. `faulthandler` answers a signal from C: it
writes to a file in memory that others on the same host read through /proc. Nothing is left behind when the process is killed.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

ANSWER_SECONDS = 5.0
"""For a stack to be written once it is asked for."""
MOMENT_SECONDS = 0.005
"""Short: a rank that was stopped goes on meanwhile."""
FILE_NAME = "meshwright-stacks"


def own_stacks() -> str:
    """Of all threads, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in frames
    )


def own_machine() -> str:
    """Of processes that can reach each other by number: containers and network namespaces may share a host's name."""
    kinds = [Path("/proc/self/ns", kind) for kind in ("pid", "net")]
    return ",".join([socket.gethostname(), *(os.readlink(kind) for kind in kinds if kind.exists())])


def answer_signals() -> int | None:
    """From now on a signal has this process write its stacks. Returns the descriptor to read; None where that cannot be done."""
    if not hasattr(os, "memfd_create") or threading.current_thread() is not threading.main_thread():
        return None
    number = os.memfd_create(FILE_NAME)
    faulthandler.register(_signal(), file=number, all_threads=True)
    return number


def _signal() -> int:
    """The last real-time signal: nobody else is known to use it."""
    return int(signal.SIGRTMAX)


def stacks_of(process: int, number: int) -> str:
    """Of another process on this host that called `answer_signals`, also one that is stopped: it is let go on for it. Empty
    where nothing came."""
    path = Path("/proc", str(process), "fd", str(number))
    with suppress(OSError):
        if FILE_NAME not in os.readlink(path):
            return ""
        with path.open(errors="replace") as file:  # before it goes on: it may end at once, and its descriptors with it
            os.kill(process, _signal())
            os.kill(process, signal.SIGCONT)
            _wait_until_written(file.fileno())
            return file.read().rstrip()
    return ""


def _wait_until_written(number: int) -> None:
    """Until something is there and nothing has come for a moment: stacks are written line by line."""
    deadline, before = time.monotonic() + ANSWER_SECONDS, 0
    while time.monotonic() < deadline:
        time.sleep(MOMENT_SECONDS)
        size = os.fstat(number).st_size
        if size and size == before:
            return
        before = size
