"""Reading many inputs in child processes, each within a limit of time and memory.

    seconds    of the process's own CPU time: a machine that is busy with other things makes nothing look like a hang. A child that
               sleeps without using the CPU is ended after PATIENCE_SECONDS; one that would run, and gets no core, is waited for
    memory     resident, its peak reset before every input; and the address space may not grow past the limit, so that no input
               can take the machine down

A child reads input after input and writes one line about each. One that dies or hangs is reported for the input that it had, and
the next child goes on behind it.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import MeshwrightError

MOST_SECONDS = 5.0
PATIENCE_SECONDS = 120.0
NATIVE_SECONDS = 60.0
"""Of CPU time, for an input whose reading sees no signal: it is in native code."""
MOST_BYTES = 1 << 30
TELL, TELLING_SECONDS = signal.SIGUSR2, 2.0
"""What has a child write down where its threads stand."""
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


Read = Callable[[int], None]
Prepare = Callable[[], None]


def read_all(numbers: range, reader: Callable[[int], tuple[Read, Prepare]], at_once: int = 1) -> Iterator[Outcome]:
    """reader: for each of so many children that read side by side, what makes and reads the input of a number, and what is called
    once in every child."""
    batches = deque(list(numbers[start : start + BATCH]) for start in range(0, len(numbers), BATCH))
    idle, busy = list(range(at_once)), dict[int, _Child]()
    try:
        while batches or busy:
            while batches and idle:
                slot = idle.pop()
                child = _Child(slot, batches.popleft(), *reader(slot))
                busy[child.pipe] = child
            ready = select.select(list(busy), [], [], 1.0)[0]
            for pipe in [one for one in busy if one in ready or busy[one].sleeps]:
                child = busy[pipe]
                yield from child.outcomes(pipe in ready)
                if child.has_ended:
                    del busy[pipe]
                    idle.append(child.slot)
                    if child.left:
                        batches.appendleft(child.left)
    finally:
        for child in busy.values():
            child.kill()


class Life:
    """Whether a process still does something: it has used the CPU since the last look, or would if it got a core."""

    def __init__(self, process: int) -> None:
        self._stat = Path(f"/proc/{process}/stat")
        self._ticks, self._at = self._look()[1], time.monotonic()
        self._most_ticks = self._ticks + NATIVE_SECONDS * os.sysconf("SC_CLK_TCK")

    def silent_seconds(self) -> float:
        state, ticks = self._look()
        if ticks > self._most_ticks:
            return math.inf
        if state == "R" or ticks > self._ticks:
            self._ticks, self._at = ticks, time.monotonic()
        return time.monotonic() - self._at

    def _look(self) -> tuple[str, int]:
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return "gone", 0
        return fields[0], int(fields[11]) + int(fields[12])


class _Child:
    """Reads a batch. One that dies or hangs is said of the input that it had; what is left is for the next."""

    def __init__(self, slot: int, numbers: list[int], read: Read, prepare: Prepare) -> None:
        self.slot, self.left, self.has_ended = slot, numbers, False
        self._stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until the child has ended)
        sys.stdout.flush()
        self.pipe, writing = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self.pipe)
            faulthandler.register(TELL, self._stacks)
            _child(numbers, read, prepare, writing)
        os.close(writing)
        self._rest, self._life = b"", Life(self.process)

    @property
    def sleeps(self) -> bool:
        return self._life.silent_seconds() > PATIENCE_SECONDS

    def outcomes(self, is_ready: bool) -> Iterator[Outcome]:
        if not is_ready:
            words = f"asleep for {PATIENCE_SECONDS:.0f} s\n{self._where()}"
            self.kill()
            yield Outcome(self.left.pop(0), "hang", words)
            return
        self._life = Life(self.process)
        found = os.read(self.pipe, 1 << 16)
        *whole, self._rest = (self._rest + found).split(b"\n")
        for line in whole:
            outcome = Outcome(**json.loads(line))
            self.left = self.left[self.left.index(outcome.number) + 1 :]
            yield outcome
        if not found and (status := self._wait()) and self.left:
            yield Outcome(self.left.pop(0), "traceback", f"the process ended with status {status}")

    def _where(self) -> str:
        """The stacks of its threads, the one that reads last."""
        os.kill(self.process, TELL)
        time.sleep(TELLING_SECONDS)
        self._stacks.seek(0)
        return self._stacks.read()

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        self._wait()

    def _wait(self) -> int:
        os.close(self.pipe)
        self._stacks.close()
        self.has_ended = True
        return os.waitpid(self.process, 0)[1]


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


@contextmanager
def untimed() -> Iterator[None]:
    """In what reads: the time and memory taken here are not the input's."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    yield
    _reset_peak()
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)


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
