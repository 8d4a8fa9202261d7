"""Commands in processes of their own that are forked from one which has loaded torch, as `python -m MODULE` would run them."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hosts import Host, Spawn, spawned
from pool import forking

from meshwright.runtime.template import Template, serve

LOOK_SECONDS = 0.01
NEW_NET, NEW_MOUNTS, SLAVE, BIND = 0x40000000, 0x00020000, (1 << 19) | (1 << 14), 1 << 12
"""CLONE_NEWNET, CLONE_NEWNS, MS_SLAVE | MS_REC and MS_BIND of Linux."""


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


class ForkedProcess:
    """What tests use of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.cpu_seconds = 0.0
        """Of processors: by the process and by all it has waited for; known when it has ended."""

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status, used = os.wait4(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            self.cpu_seconds = used.ru_utime + used.ru_stime
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
            time.sleep(LOOK_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedCommand(ForkedProcess):
    """A running `python -m MODULE ARGUMENTS` or `python -c CODE ARGUMENTS`."""

    def __init__(self, template: Template, arguments: list[str], environment: Mapping[str, str], folder: Path) -> None:
        """arguments: the module's name first, or -c and code."""
        self._files = [folder / f".{name}-{time.monotonic_ns()}" for name in ("out", "err")]
        before = Path.cwd()
        os.chdir(folder)
        try:
            words = [*map(str, self._files), *arguments]
            super().__init__(template.start(f"{__name__}:main", words, environment))
        finally:
            os.chdir(before)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (file.read_text() for file in self._files)
        return out, err


def forked_on_host(template: Template) -> Spawn:
    """What two local hosts start: `python -m MODULE ARGUMENTS` is forked, other commands are as they are."""

    def spawn(host: Host, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None) -> Any:
        python, *words = command
        if python != sys.executable or words[0] != "-m":
            return spawned(host, command, environment, output)
        out = os.devnull if output is None else output.name
        place = [host.name, ",".join(map(str, host.cores)), out]
        return ForkedProcess(template.start(f"{__name__}:main_on_host", [*place, *words[1:]], environment))

    return spawn


def main() -> None:
    """In the forked process: output into files, then the module as the main one."""
    out, err, module, *arguments = sys.argv[1:]
    for name, number in ((out, 1), (err, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    run(module, arguments)


def main_on_host() -> None:
    """The same on a host: in its network namespace, with its names, on its cores."""
    name, cores, out, module, *arguments = sys.argv[1:]
    enter(name)
    os.sched_setaffinity(0, map(int, cores.split(",")))
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    run(module, arguments)


def run(module: str, arguments: list[str]) -> None:
    from forked_agent import forking_ranks

    if module == "-c":
        code, *others = arguments
        sys.argv = ["-c", *others]
        exec(code, {"__name__": "__main__"})
        return
    sys.argv = [module, *arguments]
    with forking_ranks(module):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def enter(namespace: str) -> None:
    """As `ip netns exec` does: what lies in /etc/netns/NAME is seen in /etc."""
    system = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        _called(system.setns(file.fileno(), NEW_NET))
    _called(system.unshare(NEW_MOUNTS))
    _called(system.mount(b"none", b"/", None, SLAVE, None))
    for own in Path("/etc/netns", namespace).iterdir():
        if (seen := Path("/etc", own.name)).exists():
            _called(system.mount(bytes(own), bytes(seen), b"none", BIND, None))


def _called(answer: int) -> None:
    if answer:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
