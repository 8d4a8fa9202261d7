"""The lock of a run folder: one launcher writes into it at a time.

    run.lock        who holds the folder: host, boot, process, start of the process; made whole and in one step, by a link

A lock is stale when its process has ended, or its machine has been started anew since. A holder that cannot be looked at from here
(another host, another container) is watched: one that lives touches its lock every few seconds. See docs/decisions/0040.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from meshwright.core.codec import Value
from meshwright.core.errors import InputError
from meshwright.core.files.given_file import read_given_bytes
from meshwright.runtime.process import Process, process_of, seen

FILE = "run.lock"
BEAT_SECONDS = 5.0
"""Between two touches of a lock by its holder."""
WATCH_SECONDS = 30.0
"""For a touch by a holder that cannot be seen."""
LOOK_SECONDS = 0.5
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links answer."""
JOB = "SLURM_JOB_ID"
"""A job that is queued again keeps its number: what it held is its own."""


class Holder(Value, kw_only=True):
    """Who holds a run folder: `run.lock`."""

    format: Literal[1] = 1
    process: Process
    token: str
    """Of this one hold."""
    since: str
    """For people."""
    job: str = ""


class RunLock:
    """Of one run folder, from `take` to `release`."""

    def __init__(self, folder: str | Path, process: int | None = None, is_same_job: bool = False) -> None:
        """process: who holds it, if not this one. is_same_job: whether whoever has it is an earlier start of this job."""
        self.folder, self.is_same_job = Path(folder), is_same_job
        self.holder = Holder(
            process=process_of(process or os.getpid()),
            token=uuid.uuid4().hex,
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            job=os.environ.get(JOB, ""),
        )
        self._made = False
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._touch, name="meshwright-run-lock", daemon=True)

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self) -> None:
        """Refused where another process holds the folder; its run is not touched."""
        self._made = not self.folder.exists()
        holder = _read(self.path)
        if holder is not None and not self._is_ours(holder) and seen(holder.process) == "runs":
            raise InputError(_in_use(self.folder, holder))  # also where the disk has no room for a lock of our own
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._place()
        except OSError as error:
            self._leave_folder()
            raise InputError(
                f"run folder {self.folder} cannot be made or written: {error.strerror}: make room or check its rights, or choose "
                "another with --out"
            ) from error
        self._beat.start()

    def follow(self, moved: Path) -> None:
        """The folder was moved, and another made in its place: hold that one. What is moved is nobody's."""
        try:
            self._place()
        finally:
            (moved / FILE).unlink(missing_ok=True)

    def release(self) -> None:
        self._ended.set()
        if self._beat.is_alive():
            self._beat.join()
        with suppress(OSError):
            if _token(self.path) == self.holder.token:
                self.path.unlink()
        self._leave_folder()

    def _leave_folder(self) -> None:
        """One that was made for the lock alone goes with it."""
        if self._made:
            with suppress(OSError):
                self.folder.rmdir()

    def _place(self) -> None:
        """Link a whole file to the lock's name: there is no moment at which two have it."""
        draft = self.folder / f".{FILE}.{self.holder.token}"
        try:
            draft.write_text(self.holder.to_json(), encoding="utf-8")
            with _one_at_a_time(self.folder):
                if self.path.exists():
                    self._clear()
                _link(draft, self.path)
        except FileExistsError:
            raise InputError(_in_use(self.folder, _read(self.path))) from None
        finally:
            draft.unlink(missing_ok=True)

    def _clear(self) -> None:
        """A lock that is stale, or this job's own, goes; any other is a refusal."""
        holder, token = _read(self.path), _token(self.path)
        if not self._is_ours(holder) and _is_held(self.path, holder):
            raise InputError(_in_use(self.folder, holder))
        if _token(self.path) == token:
            self.path.unlink()

    def _is_ours(self, holder: Holder | None) -> bool:
        return self.is_same_job or (holder is not None and holder.job != "" and holder.job == self.holder.job)

    def _touch(self) -> None:
        """A folder that was removed and made anew, by the run that lives there, is held again."""
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError, InputError):
                if self.path.exists():
                    os.utime(self.path)
                elif self.folder.exists():
                    self._place()


def check_free(folder: Path) -> None:
    """A folder that a live process holds is refused; nothing is taken."""
    holder = _read(folder / FILE)
    if (folder / FILE).exists() and _is_held(folder / FILE, holder):
        raise InputError(_in_use(folder, holder))


def _is_held(path: Path, holder: Holder | None) -> bool:
    state = seen(holder.process) if holder is not None else "unknown"
    return state == "runs" or (state == "unknown" and _is_touched(path))


def _is_touched(path: Path) -> bool:
    """Whether somebody renews a lock. Only its own changes count: clocks of two machines are not compared."""
    before, deadline = _touched(path), time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        if (now := _touched(path)) != before:
            return now is not None
        time.sleep(LOOK_SECONDS)
    return False


def _touched(path: Path) -> int | None:
    """Opened, so that a network file system asks its server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _read(path: Path) -> Holder | None:
    """None where there is none, or nothing that can be read."""
    try:
        return Holder.from_json(read_given_bytes(path), str(path))
    except InputError:
        return None


def _token(path: Path) -> str:
    holder = _read(path)
    return holder.token if holder is not None else ""


def _in_use(folder: Path, holder: Holder | None) -> str:
    if holder is None:
        return f"{folder} is in use by another process ({folder / FILE} is renewed): choose another folder with --out"
    process = holder.process
    stop = f"stop it (kill {process.number})" if seen(process) == "runs" else "stop it there"
    return (
        f"{folder} is in use: {process.words} has trained there since {holder.since}, and goes on untouched; wait for its end, "
        f"{stop}, or choose another folder with --out"
    )


def _link(source: Path, target: Path) -> None:
    """Fails where the target is there. A file system without links takes a new file, which is whole a moment later."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with target.open("xb") as file:
            file.write(source.read_bytes())


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Two that find the same stale lock at once must not both remove it. A file system without such locks has the link alone."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
