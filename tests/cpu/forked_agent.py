"""torchrun whose ranks are forked from itself, which has torch loaded: a rank that loads it anew takes three seconds of a core.

What torchrun does is torchrun's own; only how it starts a Python is replaced. The stand-in for SLURM starts new ones.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import subprocess_handler

from meshwright.runtime.template import Template, template_at_hand, template_of

AGENTS = ("torch.distributed.run", "meshwright.runtime.torchrun")
LOOK_SECONDS = 0.01
Handler: Any = subprocess_handler.SubprocessHandler


class ForkedRank:
    """What torchrun uses of subprocess.Popen."""

    def __init__(self, template: Template, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.pid = template.start(f"{__name__}:main", arguments, environment, f"mw-rank-{environment['RANK']}")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked rank", timeout or 0.0)
            time.sleep(LOOK_SECONDS)
        return code


@contextmanager
def forking_ranks(module: str) -> Iterator[None]:
    """While an agent runs in this process. Commands that are not Python's are started as torchrun starts them."""
    if module not in AGENTS:
        yield
        return
    as_torchrun = Handler._popen

    def popen(handler: object, arguments: tuple[str, ...], environment: dict[str, str]) -> Any:
        template, (python, *words) = template_at_hand(), arguments
        if template is None or python != sys.executable:
            return as_torchrun(handler, arguments, environment)
        return ForkedRank(template, [word for word in words if word != "-u"], environment)

    with template_of(()):
        Handler._popen = popen
        yield  # and then the process ends


def main() -> None:
    """In a forked rank: `python -m MODULE ARGUMENTS` or `python FILE ARGUMENTS`."""
    first, *others = sys.argv[1:]
    if first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        runpy.run_path(first, run_name="__main__")
