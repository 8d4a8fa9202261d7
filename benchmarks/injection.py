"""Faults put upon the ranks of a running job from outside, and what a job may leave behind.

    kill     SIGKILL                                  raise    SIGUSR1, which the model answers with an error
    stop     SIGSTOP                                  cut      the ranks' connections with each other are shut down

A connection is shut down without a word of the process: its descriptor is taken over (`pidfd_getfd` of Linux), as a firewall or
a pulled cable would have it end. What the kernel does not allow is said in words by `why_not`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

KINDS = ("kill", "stop", "raise", "cut")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1}
TAKE_DESCRIPTOR = 438
"""The number of pidfd_getfd on every processor Linux runs torch on."""
ESTABLISHED = "01"
FORKED = "mw-rank-"
"""What the name of a forked rank begins with."""


def inject(kind: str, rank: int, ranks: dict[int, int]) -> bool:
    """Do it to one rank; False where there was nothing to do it to. ranks: rank → process."""
    if kind == "cut":
        return shut_connections(ranks) > 0
    with suppress(ProcessLookupError):
        os.kill(ranks[rank], SIGNALS[kind])
        return True
    return False


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank → process of the launcher's children that are ranks.

    One that was forked has a name of its own; others have the environment they were started with.
    """
    found = {}
    for process in children(launcher):
        with suppress(OSError):
            name = Path(f"/proc/{process}/comm").read_text().strip()
            environment = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
            told = [name.removeprefix(FORKED)] if name.startswith(FORKED) else []
            told += [item.removeprefix("RANK=") for item in environment if item.startswith("RANK=")]
            found |= {int(number): process for number in told[:1]}
    return found


def alive(process: int) -> bool:
    """Not one that has ended and waits to be asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def age_seconds(process: int) -> float:
    """Since its start."""
    started = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def children(parent: int) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                yield int(status.parent.name)


def shut_connections(ranks: dict[int, int]) -> int:
    """Between ranks; those to the launcher's store stay. Returns how many ends were shut."""
    ends = {end for process in ranks.values() for end in tcp_ends(process)}
    both = {(local, remote) for _, _, local, remote in ends}
    between = [(process, number) for process, number, local, remote in ends if (remote, local) in both]
    return sum(_shut(process, number) for process, number in between)


def tcp_ends(process: int) -> Iterator[tuple[int, int, str, str]]:
    """Process, descriptor, local and remote address of its open connections."""
    sockets = {}
    with suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                name = os.readlink(link)
                if name.startswith("socket:["):
                    sockets[name[8:-1]] = int(link.name)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED and fields[9] in sockets:
                    yield process, sockets[fields[9]], fields[1], fields[2]


def _shut(process: int, number: int) -> bool:
    with suppress(OSError):
        held = os.pidfd_open(process)
        try:
            taken = ctypes.CDLL(None, use_errno=True).syscall(TAKE_DESCRIPTOR, held, number, 0)
            if taken < 0:
                return False
            with socket.socket(fileno=taken) as end:
                end.shutdown(socket.SHUT_RDWR)
            return True
        finally:
            os.close(held)
    return False


def why_not(kind: str) -> str:
    """What keeps a kind of fault from being made here; empty where nothing does."""
    if kind != "cut":
        return ""
    if not hasattr(os, "pidfd_open"):
        return "connections of another process can be cut on Linux only"
    one, other = socket.socketpair()
    with one, other:
        held = os.pidfd_open(os.getpid())
        taken = ctypes.CDLL(None, use_errno=True).syscall(TAKE_DESCRIPTOR, held, one.fileno(), 0)
        os.close(held)
        if taken < 0:
            return f"descriptors of another process may not be taken over here ({os.strerror(ctypes.get_errno())}): run as root"
        os.close(taken)
    return ""


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def drafts(checkpoints: Path) -> list[str]:
    """What an interrupted save left that nobody removed."""
    return sorted(path.name for path in checkpoints.iterdir() if path.name.startswith("."))
