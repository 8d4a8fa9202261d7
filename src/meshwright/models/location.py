"""file:line of the code that is being followed: the user's, not torch's and not ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def line_now() -> str:
    """Of the innermost frame of the user's code that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return _spelled(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "?"


def line_of(error: BaseException) -> str:
    """Of the last frame of the user's code that an error went through; '' where it met none, as in backward."""
    own = [frame for frame in _frames(error.__traceback__) if _is_users(frame[0])]
    return _spelled(*own[-1]) if own else ""


def _frames(step: TracebackType | None) -> Iterator[tuple[str, int]]:
    while step is not None:
        yield step.tb_frame.f_code.co_filename, step.tb_lineno
        step = step.tb_next


def _is_users(filename: str) -> bool:
    return not filename.startswith((*_OTHERS, "<"))


def _spelled(filename: str, number: int) -> str:
    return f"{Path(filename).name}:{number}"
