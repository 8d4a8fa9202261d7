"""Along which axis the collective that runs now goes.

Axes of the same ranks share a process group, so that a group alone does not tell them apart: who calls a collective along an
axis of the model says so here, and the recorder reads it. What nobody names belongs to the group's own axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.core.axes import Axis

_named: list[Axis] = []


@contextmanager
def along(axis: Axis) -> Iterator[None]:
    _named.append(axis)
    try:
        yield
    finally:
        _named.pop()


def named_axis() -> Axis | None:
    return _named[-1] if _named else None
