"""The process of one local rank: `python -m meshwright.runtime.rank FUNCTION PAYLOAD RESULT`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from meshwright.core.errors import HangError, MeshwrightError, OutOfMemoryError
from meshwright.runtime.affinity import pin


def main() -> None:
    function, payload_file, result_file = sys.argv[1:]
    threads = pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    import torch

    torch.set_num_threads(threads)
    try:
        result = _resolve(function)(json.loads(Path(payload_file).read_text()))
    except BaseException as error:  # torch has errors that are no Exceptions
        report(error)
        leave(1)
    if os.environ["RANK"] == "0" and result is not None:
        Path(result_file).write_text(json.dumps(result))
    leave(0)


def leave(code: int) -> NoReturn:
    """End at once, without Python's and C++'s own farewell.

    A process group with a broken peer may hang while it is taken down; and gloo's threads, when `fully_shard` has used
    them, sometimes abort the process after everything is done ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _resolve(name: str):  # type: ignore[no-untyped-def]
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def report(error: BaseException) -> None:
    """Leave the error where the launcher looks for it. Our own errors speak for themselves; others need their lines."""
    message = str(error)
    if not isinstance(error, MeshwrightError):
        message = f"{type(error).__name__}: {message}\n{_lines(error)}"
    now = time.time()
    details = {"message": message, "seconds": now, "timestamp": str(int(now)), "hang": isinstance(error, HangError)}
    details["out_of_memory"] = isinstance(error, OutOfMemoryError)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


def _lines(error: BaseException) -> str:
    """Where it came from: our lines and the user's; torch's own, many and always the same, are left out."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    return "\n".join(f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)


if __name__ == "__main__":
    main()
