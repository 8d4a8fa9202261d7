"""Steps: a forward and its loss, seen from outside the blocks, before they are laid on stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.core.flow import Flow


class Passed(NamedTuple):
    """A result of a block that is one of its arguments."""

    position: int


@dataclass(frozen=True)
class Answer:
    """What a block returned and left behind (`effects.py`): tensors without values, `Passed`, and plain values, in their nest."""

    leaves: tuple[Any, ...]
    structure: Any
    has_effects: bool = False
    was_followed: bool = True


@dataclass(frozen=True)
class Steps:
    """The events of a forward before they are laid on stages, and its flow; the flow has the parameters first."""

    flow: Flow
    names: tuple[str, ...]
    answers: tuple[Answer | None, ...]
    parameters: dict[str, int]
    """Those read outside their block → the number of each."""
    first_versions: dict[int, int]
    """Tensors that came of changing another in place → the number of what was changed first."""
