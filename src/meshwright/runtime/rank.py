"""The process of one local rank: `python -m meshwright.runtime.rank FUNCTION PAYLOAD RESULT`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from meshwright.core.errors import (
    CorruptionError,
    FailsUnderPlanError,
    HangError,
    MeshwrightError,
    OutOfMemoryError,
    RunError,
)
from meshwright.core.run.fault import Fault, FaultKind
from meshwright.runtime.affinity import pin

SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""
LAUNCHER = "MESHWRIGHT_LAUNCHER"
"""The process of the launcher, where a rank is its child."""
BROKEN = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "connection refused")
"""What gloo says in plain RuntimeErrors when a peer, or the way to it, is gone."""


def main() -> None:
    function, payload_file, result_file = sys.argv[1:]
    end_with_launcher()
    threads = pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    import torch

    torch.set_num_threads(threads)
    try:
        result = _resolve(function)(json.loads(Path(payload_file).read_text()))
    except BaseException as error:  # torch has errors that are no Exceptions
        report(error)
        leave(1)
    try:
        if os.environ["RANK"] == "0" and result is not None:
            _write_over(Path(result_file), json.dumps(result).encode())
    except OSError as error:
        report(
            RunError(
                f"all is done, but {result_file} cannot be written: {error.strerror}: make room there, or set TMPDIR"
            )
        )
        leave(1)
    leave(0)


def _write_over(path: Path, text: bytes) -> None:
    """Into the room that a file has already; what is left of it is given up last."""
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        left = memoryview(text)
        while left:
            left = left[file.write(left) :]
        file.truncate()


def started_by_launcher() -> bool:
    """Whether torchrun, or our own launcher, has made this process a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def leave(code: int) -> NoReturn:
    """End at once, without Python's and C++'s own farewell.

    A process group with a broken peer may hang while it is taken down; and gloo's threads, when `fully_shard` has used
    them, sometimes abort the process after everything is done ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_launcher() -> None:
    """A launcher that is killed takes its ranks with it, at once. Linux only.

    What outlived it would write into a folder that nobody holds any more; and one that is stopped sees no other signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):  # it was killed before this was said
            leave(1)


def _resolve(name: str):  # type: ignore[no-untyped-def]
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def report(error: BaseException) -> None:
    """Leave the error where the launcher looks for it. Our own errors speak for themselves; others need their lines."""
    message = str(error)
    if not isinstance(error, MeshwrightError):
        message = f"{type(error).__name__}: {without_chatter(message)}\n{_lines(error)}"
    now = time.time()
    details = {"message": message, "seconds": now, "timestamp": str(int(now)), "hang": isinstance(error, HangError)}
    details["out_of_memory"] = isinstance(error, OutOfMemoryError)
    details["refused"] = isinstance(error, MeshwrightError) and not isinstance(error, RunError)
    details["fails_under_plan"] = isinstance(error, FailsUnderPlanError)
    details["fault"] = msgspec.to_builtins(fault_of(error, message))
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        if path:
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
    except OSError as failed:
        print(f"error: {message}\n  {path} could not be written: {failed.strerror}", file=sys.stderr)


def fault_of(error: BaseException, message: str) -> Fault:
    """The error as a fault of this rank; a hang knows better whose it is."""
    if isinstance(error, RunError) and error.fault is not None:
        return error.fault
    from meshwright.runtime.standing import current_step, last_collective

    return Fault(
        kind=_kind(error),
        ranks=(int(os.environ.get("RANK", "0")),),
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        host=socket.gethostname(),
        step=current_step(),
        collective=last_collective(),
        words=message,
    )


def _kind(error: BaseException) -> FaultKind:
    if isinstance(error, CorruptionError):
        return "corrupt"
    if isinstance(error, MeshwrightError) and not isinstance(error, FailsUnderPlanError):
        return "refused"
    return "lost" if is_broken_link(error) else "raised"


def without_chatter(message: str) -> str:
    """gloo's messages without the place in its source, and without its guesses and good wishes."""
    return re.sub(
        r"\[/\S*/gloo/\S+:\d+\] ", "", re.sub(r" This is typically caused by.*?GLHF!( ?\W+$)?", "", message, flags=re.S)
    )


def is_broken_link(error: BaseException) -> bool:
    from torch.distributed import DistError

    if isinstance(error, (DistError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in BROKEN)


def lines_of(error: BaseException) -> str:
    """The last lines of the user's code and of ours that an error went through, on one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    ours = [frame for frame in frames if "/meshwright/" in frame.filename]
    users = [frame for frame in frames if frame not in ours]
    last = {f"{Path(frame.filename).name}:{frame.lineno}" for kind in (users, ours) for frame in kind[-1:]}
    return ", ".join(sorted(last))


def _lines(error: BaseException) -> str:
    """Where it came from: our lines and the user's; torch's own, many and always the same, are left out."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    return "\n".join(f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)


if __name__ == "__main__":
    main()
