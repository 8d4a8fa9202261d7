"""What each rank of `meshwright launch --ray` runs."""

from __future__ import annotations

from typing import Any


def run_verb(payload: dict[str, Any]) -> None:
    """What each rank runs: a verb of the command line, as under torchrun."""
    import os

    from meshwright.cli.app import app
    from meshwright.runtime.rank import leave

    os.chdir(payload["folder"])
    code = app(args=list(payload["arguments"]), standalone_mode=False)
    if isinstance(code, int):
        leave(code)
