"""A process by a name that no other process ever has, and whether it still runs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from meshwright.core.codec import Value

Seen = Literal["runs", "ended", "unknown"]
"""unknown: it is of another machine or container, whose processes cannot be looked at from here."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
NUMBERS = Path("/proc/self/ns/pid")


class Process(Value, kw_only=True):
    """A process that cannot be taken for another: by host, boot, namespace, number and start."""

    host: str
    boot: str = ""
    """Identity of this run of the machine's kernel; empty where the system does not say."""
    numbers: str = ""
    """Within what its number counts: every container has numbers of its own."""
    number: int
    started: str = ""
    """Ticks of the clock from the boot to its start: numbers are used again."""

    @property
    def words(self) -> str:
        return f"process {self.number} on host {self.host}"


def process_of(number: int) -> Process:
    """A process of this machine that runs now."""
    boot, numbers = _surroundings()
    return Process(host=socket.gethostname(), boot=boot, numbers=numbers, number=number, started=_started(number) or "")


def seen(process: Process) -> Seen:
    boot, numbers = _surroundings()
    if process.boot != boot:
        return "ended" if process.host == socket.gethostname() else "unknown"
    if process.numbers != numbers:
        return "unknown"
    if boot:
        return "runs" if process.started and _started(process.number) == process.started else "ended"
    return _answers(process.number) if process.host == socket.gethostname() else "unknown"


def children() -> set[int]:
    """Of this process; none where the system does not say."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(_fields(file)[1]) == os.getpid():
                found.add(int(file.parent.name))
    return found


def _answers(number: int) -> Seen:
    """Where there is no /proc: numbers that are used again are taken for the process."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return "ended"
    except PermissionError:
        return "runs"
    return "runs"


def _started(number: int) -> str | None:
    """None where it has ended, also where its parent has not asked yet how."""
    try:
        fields = _fields(Path(f"/proc/{number}/stat"))
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def _fields(file: Path) -> list[str]:
    """Those behind the name, which may hold anything: state, parent, …"""
    return file.read_text(errors="replace").rpartition(")")[2].split()


@cache
def _surroundings() -> tuple[str, str]:
    """Identity of the boot, and of the space that processes are numbered in."""
    boot = numbers = ""
    with suppress(OSError):
        boot = BOOT.read_text().strip()
    with suppress(OSError):
        numbers = os.readlink(NUMBERS)
    return boot, numbers
