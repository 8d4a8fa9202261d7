"""Where a verb writes: people's text on one side, one JSON object on the other."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EAGAIN, EDQUOT, ENOSPC
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import msgspec

from meshwright.core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

PASSING = (EAGAIN, EDQUOT, ENOSPC)
"""Errors of a stream that may take text again later."""


class LastingStream(io.TextIOBase):
    """Standard output or standard error of a run: a run goes on when nobody can read what it prints any more.

    A terminal may be closed, `| head` may end, the disk of a redirected log may be full. The text is lost; the metrics are not,
    since they have a file of their own. What is gone for good is replaced by /dev/null, for whatever else writes there.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """stream: None where the process was started without one."""
        self._stream = stream

    def write(self, text: str) -> int:
        with self._unheard():
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._unheard():
            if self._stream is not None:
                self._stream.flush()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding if self._stream is not None else "utf-8"

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in PASSING:
                self._leave()

    def _leave(self) -> None:
        assert self._stream is not None
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


def make_console(as_json: bool) -> Console:
    """With --json the text goes to standard error, so that standard output is the object alone.

    Away from a terminal tables are as wide as they need: a log file has no edge.
    """
    stream = sys.stderr if as_json else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    return _console(stream, None if is_terminal else 140)


def make_run_console(as_json: bool, *, quiet: bool = False, force_terminal: bool | None = None) -> Console:
    """The console of a run, of its launcher and its ranks: the run does not end with its terminal."""
    stream = LastingStream(sys.stderr if as_json else sys.stdout)
    width = None if stream.isatty() or force_terminal else 140
    file = cast("IO[str]", stream)  # all of it that a console uses
    return _console(file, width, quiet, force_terminal)


def _console(file: IO[str], width: int | None, quiet: bool = False, force_terminal: bool | None = None) -> Console:
    """Texts of others have brackets, which are no markup."""
    from rich.console import Console

    return Console(file=file, width=width, quiet=quiet, force_terminal=force_terminal, markup=False, highlight=False)


@contextmanager
def writing(file: str | Path, what_to_do: str = "") -> Iterator[None]:
    """A file that cannot be written is refused in words."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}{what_to_do}") from error


def print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)
