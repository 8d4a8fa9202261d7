"""The command line: one file per verb, each parses, calls, prints. A verb is loaded when it is called."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> None:
    """Entry point. Our own errors are one line; a bug shows its traceback."""
    try:
        _run()
    except KeyboardInterrupt:  # also while modules are loaded
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _run() -> None:
    from meshwright.cli.app import app
    from meshwright.core.errors import MeshwrightError, RefusedError, RunError

    try:
        app()
    except MeshwrightError as error:
        failed = isinstance(error, RunError) and not isinstance(error, RefusedError)
        _end(error, 1 if failed else 2)


def _end(error: Exception, code: int) -> NoReturn:
    """Say it once, however many ranks meet the same error, and end at once: other ranks may wait for this one."""
    if "RANK" not in os.environ:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(code)
    from meshwright.runtime.rank import leave
    from meshwright.runtime.watchdog import is_first_to_say

    if is_first_to_say():
        print(f"error: {error}", file=sys.stderr)
    leave(code)
