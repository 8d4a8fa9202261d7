"""Where a verb writes: people's text on one side, one JSON object on the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def make_console(as_json: bool) -> Console:
    """With --json the text goes to standard error, so that standard output is the object alone.

    Away from a terminal tables are as wide as they need: a log file has no edge.
    """
    from rich.console import Console

    stream = sys.stderr if as_json else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 140, markup=False)  # texts of others have brackets


def say_on(console: Console) -> Callable[[str], None]:
    """Lines about work that takes long."""
    return lambda words: console.print(words, highlight=False)


def print_json(value: Any) -> None:
    import msgspec

    print(msgspec.json.encode(value).decode(), flush=True)
