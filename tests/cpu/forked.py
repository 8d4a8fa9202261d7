"""Commands in processes of their own that are forked from one which has loaded torch, as `python -m MODULE` would run them."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pool import forking

from meshwright.runtime.template import Template, serve

LOOK_SECONDS = 0.01


@contextmanager
def command_template() -> Iterator[Template]:
    """One a test process: its commands, their templates and ranks all come from what the pools' server has loaded."""
    context = forking()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    template = Template(ours)
    try:
        yield template
    finally:
        template.close()
        process.join()


class ForkedCommand:
    """A running `python -m MODULE ARGUMENTS`: what tests use of subprocess.Popen."""

    def __init__(self, template: Template, arguments: list[str], environment: Mapping[str, str], folder: Path) -> None:
        """arguments: the module's name first."""
        self._files = [folder / f".{name}-{time.monotonic_ns()}" for name in ("out", "err")]
        self.returncode: int | None = None
        self.cpu_seconds = 0.0
        """Of processors: by the command and by all it has waited for; known when it has ended."""
        before = Path.cwd()
        os.chdir(folder)
        try:
            self.pid = template.start(f"{__name__}:main", [*map(str, self._files), *arguments], environment)
        finally:
            os.chdir(before)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status, used = os.wait4(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            self.cpu_seconds = used.ru_utime + used.ru_stime
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked command", timeout or 0.0)
            time.sleep(LOOK_SECONDS)
        out, err = (file.read_text() for file in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    """In the forked process: output into files, then the module as the main one."""
    out, err, module, *arguments = sys.argv[1:]
    for name, number in ((out, 1), (err, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
