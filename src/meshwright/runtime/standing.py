"""Where a rank stands: the Python line its main thread is on, and the collective it waits in, if it waits in one.

Found when somebody asks, from the main thread's stack and from torch's list of collectives that are not done: nothing is
noted while training runs. Sends and receives over gloo are not in that list: they show on the stack alone.
"""

from __future__ import annotations

import linecache
import math
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from meshwright.core.codec import Value
from meshwright.core.units import format_bytes
from meshwright.runtime._torch_distributed import known_collectives, pending_collectives
from meshwright.runtime.stacks import own_stacks

TORCH = str(Path(torch.__file__).parent)
STDLIB = sysconfig.get_paths()["stdlib"]
WORLD_AXIS: dict[str, str] = {}
"""Like the group of all ranks itself, one for the process; noted on the group it would be lost, it takes no notes."""
STEP: dict[str, int] = {}
"""The step this process is in, under "now"; empty before the first."""
OURS = str(Path(__file__).parent)
WIDTHS = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}


class Call(Value, kw_only=True):
    """One collective that a rank called."""

    group: str
    """What torch calls it; ranks call the same one the same."""
    number: int
    """In the order of the group's collectives."""
    kind: str
    over: str
    words: str


class Standing(Value, kw_only=True):
    """What one rank says about itself."""

    line: str
    """FILE:LINE in FUNCTION: TEXT"""
    waits_in: str | None
    """The collective, in words; None where the rank waits in none."""
    host: str = ""
    step: int | None = None
    calls: tuple[Call, ...] = ()
    """The collectives it called of late."""
    stacks: str = ""
    """Of all its threads."""


def standing() -> Standing:
    frame = main_frame()
    pending = min(pending_collectives(), key=lambda entry: int(entry["time_created_ns"]), default=None)
    waits_in = describe(pending) if pending else _call_on_stack(frame) if is_wait(frame) else None
    return Standing(
        line=line_of(frame),
        waits_in=waits_in,
        host=socket.gethostname(),
        step=current_step(),
        calls=calls_of_late(),
        stacks=own_stacks(),
    )


def note_step(step: int) -> None:
    """For messages: the step that begins now."""
    STEP["now"] = step


def current_step() -> int | None:
    return STEP.get("now")


def last_collective() -> str | None:
    """The newest one this rank called, in words."""
    newest = max(known_collectives(), key=lambda entry: int(entry["time_created_ns"]), default=None)
    return describe(newest) if newest else None


def calls_of_late() -> tuple[Call, ...]:
    """Messages between two ranks are counted pair by pair, and left out."""
    return tuple(
        Call(
            group="/".join(map(str, entry["process_group"])),
            number=int(entry["collective_seq_id"]),
            kind=_kind(entry),
            over=_over(entry),
            words=describe(entry),
        )
        for entry in known_collectives()
        if not entry["is_p2p"]
    )


def main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident or 0]


def is_wait(frame: FrameType) -> bool:
    """Whether a thread on this innermost frame waits for other ranks, as far as Python can see."""
    file = frame.f_code.co_filename
    if file.startswith(f"{TORCH}/distributed/"):
        return True
    return file.startswith(OURS) and ".wait(" in linecache.getline(file, line_number(frame))


def line_number(frame: FrameType) -> int:
    """Of another thread's frame. While one enters a function it stands on no line: then that of the function's head."""
    number: int | None = frame.f_lineno
    return frame.f_code.co_firstlineno if number is None else number


def line_of(innermost: FrameType) -> str:
    """The innermost line outside torch and the standard library: the one a person wrote."""
    frame: FrameType | None = innermost
    while frame is not None and not _is_a_persons(frame.f_code.co_filename):
        frame = frame.f_back
    found = frame or innermost
    file, number = found.f_code.co_filename, line_number(found)
    return f"{file}:{number} in {found.f_code.co_name}: {linecache.getline(file, number).strip()}"


def _is_a_persons(file: str) -> bool:
    """Packages may lie in a folder inside the standard library's."""
    if file.startswith((TORCH, "<")):
        return False
    return not file.startswith(STDLIB) or "site-packages" in file


def describe(entry: dict[str, Any]) -> str:
    """A collective in words, such as `all_reduce over dp, 4 KiB`."""
    num_bytes = sum(
        math.prod(size) * WIDTHS.get(dtype, 4)
        for size, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    )
    return f"{_kind(entry)} over {_over(entry)}, {format_bytes(num_bytes)}"


def _kind(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _over(entry: dict[str, Any]) -> str:
    axis = str(entry["process_group"][-1]).removeprefix("mesh_")
    return WORLD_AXIS.get("default_pg", "all ranks") if axis in ("default_pg", "") else axis


def name_world(axis: str) -> None:
    """An axis of all ranks shares the group of all ranks, which has no name of its own."""
    WORLD_AXIS["default_pg"] = axis


def seconds_pending(entry: dict[str, Any]) -> float:
    return time.time() - int(entry["time_created_ns"]) / 1e9


def _call_on_stack(innermost: FrameType) -> str:
    """The innermost public function of torch.distributed on the stack."""
    frame: FrameType | None = innermost
    names = []
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return next((name for name in names if not name.startswith("_") and name != "wrapper"), "a wait for other ranks")
