"""A collective call of a step, as the cost model sees it.

Calls inside the blocks: block_calls.py and token_calls.py. Calls for parameters, gradients and the numbers of a step:
step_calls.py. Sends between pipeline stages: stage_transfers.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshwright.core.axes import Axis
from meshwright.core.collective import Collective, CollectiveKind, total
from meshwright.cost.communication.links import Group

ALONE = Group(1)
When = Literal["forward", "backward", "other", "update"]


@dataclass(frozen=True)
class Call:
    """A collective call: its bytes, when it runs in a step, and how often."""

    kind: CollectiveKind
    num_bytes: int
    count: int
    phase: When
    axis: Axis = "dp"
    group: Group = ALONE
    block: str = ""
    """The group of parameters it moves, or the block it runs in."""


def as_collectives(found: Iterable[Call]) -> tuple[Collective, ...]:
    return total(
        Collective(kind=call.kind, axis=call.axis, count=call.count, total_bytes=call.count * call.num_bytes)
        for call in found
    )
