"""A process that has loaded what ranks need: to load torch takes seconds a process, to fork one that has loaded it milliseconds.

    launcher ── fork ──► template ── fork ──► go-between, ends at once ── fork ──► rank
       ▲                                                                            │
       └── becomes its parent: the launcher takes in the children of those who end ─┘

The template is forked right after its modules are loaded, when no thread of theirs runs, and
only waits for the launcher's word. A rank begins as a new process would: with a session of its own, the environment, folder,
arguments and signals it is given, and random numbers of its own. It is a child of the launcher, which waits for it as for any.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec

from meshwright.core.errors import RunError
from meshwright.runtime.process import children

SET_CHILD_SUBREAPER, SET_NAME, SET_DEATH_SIGNAL = 36, 15, 1
"""PR_SET_CHILD_SUBREAPER, PR_SET_NAME and PR_SET_PDEATHSIG of Linux."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Meant for launcher and ranks, but often sent to all processes of a job; the template ends with its launcher."""
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Where there is a GPU. Its driver does not survive a fork, and many an import asks it something."""
WAIT_SECONDS = 0.001
ANSWER_SECONDS = 120.0
"""For a template to fork: it takes milliseconds, but a machine may be busy."""
LOG_LEVEL, RANK_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL", "ERROR"
"""Of what torch's own libraries print: a recorded step would have them warn of every tensor that is older than the step."""


Handlers = Mapping[signal.Signals, Any]
"""What a process does on a signal."""


@dataclass(frozen=True)
class Birth:
    """What a new process is to be."""

    entry: str
    """`package.module:function`, called without arguments; its module becomes the main one."""
    arguments: tuple[str, ...]
    """What the function finds behind the program's name in `sys.argv`."""
    environment: Mapping[str, str]
    folder: str
    launcher: int
    name: str = ""
    """As `ps -o comm` and `top` show it, 15 letters at most."""


class Template:
    """A process to fork others from. `close` ends it; processes that it has forked live on."""

    def __init__(self, channel: Connection, process: int | None = None) -> None:
        """channel: to a descendant of this process that runs `serve`. process: its id, where it is a child."""
        self._channel, self._process = channel, process
        self._is_gone = False

    def start(self, entry: str, arguments: Iterable[str], environment: Mapping[str, str], name: str = "") -> int:
        """A new child of this process; returns its id. An error where there is none, and then none is left half born."""
        birth = Birth(entry, tuple(arguments), dict(environment), os.getcwd(), os.getpid(), name)
        before = children()
        with _taking_in_orphans():
            child = 0 if self._is_gone else self._ask(birth)
            if not child:
                _end(children() - before)
        if not child:
            raise RunError(
                "no rank could be forked: the process they are forked from was killed, or memory is short; start the command again"
            )
        return child

    def _ask(self, birth: Birth) -> int:
        """0 where nothing came of it. A template that does not answer is of no more use."""
        try:
            self._channel.send_bytes(msgspec.msgpack.encode(birth))
            if self._channel.poll(ANSWER_SECONDS):
                return msgspec.msgpack.decode(self._channel.recv_bytes(), type=int)
        except (EOFError, OSError, msgspec.DecodeError):
            pass
        self._is_gone = True
        return 0

    def close(self) -> None:
        self._channel.close()
        if self._process is not None:
            if self._is_gone:
                os.kill(self._process, signal.SIGKILL)  # it may be stopped
            os.waitpid(self._process, 0)


_at_hand: ContextVar[Template | None] = ContextVar("meshwright-template", default=None)


def template_at_hand() -> Template | None:
    """The template of this command; None where ranks are started as plain processes."""
    return _at_hand.get()


@contextmanager
def template_of(modules: Iterable[str]) -> Iterator[None]:
    """While the block runs, ranks are forked from a template that has these modules loaded.

    To be entered before this process has done anything with torch. Where a fork is not safe nothing is loaded, and ranks are
    plain processes.
    """
    if _at_hand.get() is not None or not may_fork():
        yield
        return
    _load(modules)
    template = _fork_template() if may_fork() else None  # a module may have started a thread
    token = _at_hand.set(template)
    try:
        yield
    finally:
        _at_hand.reset(token)
        if template is not None:
            template.close()


def _load(modules: Iterable[str]) -> None:
    """As ranks load them: torch reads how much it is to print when it is loaded."""
    given = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, RANK_LOG_LEVEL)
    try:
        for module in modules:
            with suppress(ImportError):  # who needs what is not installed says so
                importlib.import_module(module)
    finally:
        if given is None:
            del os.environ[LOG_LEVEL]


def may_fork() -> bool:
    """Whether a process may go on from here: on Linux, where nothing runs beside this thread and the machine has no GPU."""
    if sys.platform != "linux" or threading.active_count() > 1 or any(os.path.exists(file) for file in DRIVERS):
        return False
    return _take_in_orphans(True) and _take_in_orphans(False)  # some sandboxes do not allow it


def _fork_template() -> Template:
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        ours.close()
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)  # it may be stopped when the launcher ends
        serve(theirs)
    theirs.close()
    return Template(ours, process)


def serve(channel: Connection) -> NoReturn:
    """The life of a template: until its launcher is gone."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    gc.freeze()  # what was loaded stays: a collection in a rank need not look through it, nor copy the pages it lies on
    while True:
        try:
            birth = msgspec.msgpack.decode(channel.recv_bytes(), type=Birth)
        except (EOFError, OSError, msgspec.DecodeError):
            os._exit(0)
        channel.send_bytes(msgspec.msgpack.encode(_bear(birth, channel, handlers)))


def _bear(birth: Birth, channel: Connection, handlers: Handlers) -> int:
    """Fork twice: the child of a go-between that has ended falls to the launcher. Returns when it has become what it is to be."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if os.fork() != 0:
            os._exit(0)
        os.close(reading)
        channel.close()
        _live(birth, between, writing, handlers)
    os.close(writing)
    os.waitpid(between, 0)
    with os.fdopen(reading) as pipe:
        return int(pipe.read() or 0)


def _live(birth: Birth, between: int, writing: int, handlers: Handlers) -> NoReturn:
    """The life of a forked process, from its birth."""
    code = 1
    try:
        while os.getppid() == between:
            time.sleep(WAIT_SECONDS)
        if os.getppid() != birth.launcher:  # it was killed meanwhile
            os._exit(code)
        _become(birth, handlers)
        if not _tell(writing, os.getpid()):
            os._exit(code)
        module, _, function = birth.entry.partition(":")
        getattr(sys.modules[module], function)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell(writing: int, process: int) -> bool:
    """The template who was born. Where it was killed meanwhile nobody would know of this process, and it is not to live."""
    try:
        os.write(writing, str(process).encode())
        os.close(writing)
    except BrokenPipeError:
        return False
    return True


def _become(birth: Birth, handlers: Handlers) -> None:
    """What a new process would find."""
    os.setsid()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.chdir(birth.folder)
    os.environ.clear()
    os.environ.update(birth.environment)
    module = importlib.import_module(birth.entry.partition(":")[0])
    sys.modules["__main__"] = module
    sys.argv = [module.__file__ or "", *birth.arguments]
    if sys.path[0] != birth.folder:
        sys.path.insert(0, birth.folder)  # as `python -m` does
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so itself after a fork
    if birth.name:
        ctypes.CDLL(None).prctl(SET_NAME, birth.name.encode())


def _end(processes: Iterable[int]) -> None:
    """Those that a template had begun when it was lost: nobody knows of them."""
    for process in processes:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


@contextmanager
def _taking_in_orphans() -> Iterator[None]:
    """Grandchildren whose parents end become children of this process."""
    _take_in_orphans(True)
    try:
        yield
    finally:
        _take_in_orphans(False)


def _take_in_orphans(wanted: bool) -> bool:
    """Returns whether the kernel agrees."""
    return int(ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)) == 0
