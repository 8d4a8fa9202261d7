"""Reading many inputs in a child process, each within a limit of time and memory.

    seconds    of the process's own CPU time: a machine that is busy with other things makes nothing look like a hang. A child that
               waits without using the CPU is ended after PATIENCE_SECONDS
    memory     resident, its peak reset before every input; and the address space may not grow past the limit, so that no input
               can take the machine down

A child reads input after input and writes one line about each. One that dies or hangs is reported for the input that it had, and
the next child goes on behind it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import MeshwrightError

MOST_SECONDS = 5.0
PATIENCE_SECONDS = 120.0
MOST_BYTES = 1 << 30
BATCH = 250
"""Inputs a child reads before a fresh one takes its place: what one leaves in caches is not the next one's."""


class TookTooLong(BaseException):
    """No `Exception`: code that passes over errors must not pass over this one."""


@dataclass(frozen=True)
class Outcome:
    number: int
    kind: str
    """accepted, refused, traceback, hang or memory."""
    words: str = ""
    peak_bytes: int = 0


def read_all(numbers: range, read: Callable[[int], None], prepare: Callable[[], None]) -> Iterator[Outcome]:
    """read: makes and reads the input of a number. prepare: called once in every child."""
    remaining = list(numbers)
    while remaining:
        for outcome in _batch(remaining[:BATCH], read, prepare):
            remaining = remaining[remaining.index(outcome.number) + 1 :]
            yield outcome


def _batch(numbers: list[int], read: Callable[[int], None], prepare: Callable[[], None]) -> Iterator[Outcome]:
    """What a child says, until it is done or has ended; then of the input that it had."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(numbers, read, prepare, writing)
    os.close(writing)
    done = 0
    try:
        with os.fdopen(reading, "rb") as pipe:
            for line in _lines(pipe):
                if line is None:
                    os.kill(child, signal.SIGKILL)
                    yield Outcome(numbers[done], "hang", f"no answer for {PATIENCE_SECONDS:.0f} s")
                    return
                done += 1
                yield Outcome(**json.loads(line))
    finally:
        status = os.waitpid(child, 0)[1]
    if status and done < len(numbers):
        yield Outcome(numbers[done], "traceback", f"the process ended with status {status}")


def _lines(pipe: Any) -> Iterator[bytes | None]:
    """None where nothing comes."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], PATIENCE_SECONDS)[0]:
            yield None
            return
        found = os.read(pipe.fileno(), 1 << 16)
        if not found:
            return
        *whole, rest = (rest + found).split(b"\n")
        yield from whole


def _child(numbers: list[int], read: Callable[[int], None], prepare: Callable[[], None], writing: int) -> None:
    try:
        _silence()
        prepare()
        signal.signal(signal.SIGPROF, _too_long)
        resident, mapped = status_bytes("VmRSS"), status_bytes("VmSize")
        limit = mapped + max(0, MOST_BYTES - resident) + MOST_BYTES // 8
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for number in numbers:
            outcome = _outcome(number, read)
            os.write(writing, json.dumps(vars(outcome)).encode() + b"\n")
            if outcome.kind in ("hang", "memory"):
                break
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


def _outcome(number: int, read: Callable[[int], None]) -> Outcome:
    _reset_peak()
    kind, words = "accepted", ""
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        read(number)
    except MeshwrightError as error:
        kind, words = "refused", f"{type(error).__name__}: {error}"[:300]
    except TookTooLong:
        kind, words = "hang", traceback.format_exc()
    except MemoryError:
        kind, words = "memory", traceback.format_exc()
    except (Exception, SystemExit):
        kind, words = "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    peak = status_bytes("VmHWM")
    if peak > MOST_BYTES:
        kind, words = "memory", f"{peak} bytes\n{words}"
    return Outcome(number, kind, words, peak)


def _too_long(number: int, frame: object) -> None:
    raise TookTooLong


def _silence() -> None:
    """What is printed about an input is not looked at."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def wait_for(child: int, seconds: float) -> None:
    """Of a process that this one started."""
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
