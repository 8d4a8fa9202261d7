"""A Schedule: the order of all stage work in a step, as data.

One list of actions per pp coordinate. The runtime loops over it, the cost model plays it, the report draws it.
There are v · p stages, mapped to coordinates in a loop or a V (`core/pipeline/placement.py`). Who makes one: `rules/schedules.py`;
who proves each kind legal: `tests/pure/legal_schedule.py`.

Sends are buffered (torch's isend): a send ends at once, a receive waits for its send. Nothing but order tells two
messages of a link apart, so the receives of each link come in the order of its sends. A link is one way between two
coordinates; activations and gradients share it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from meshwright.core.bounds import Degree, Samples
from meshwright.core.codec import CheckedValue
from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.kinds import ScheduleKind
from meshwright.core.pipeline.placement import Placement, coordinate_of

ActionKind = Literal[
    "forward", "backward", "backward_inputs", "backward_weights",
    "send_forward", "receive_forward", "send_backward", "receive_backward", "update",
]  # fmt: skip
COMPUTE_KINDS = ("forward", "backward", "backward_inputs", "backward_weights")


class Action(msgspec.Struct, frozen=True, array_like=True):
    """One unit of stage work: `["forward", stage, microbatch]`. An update belongs to no microbatch: it has number 0."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


Order: TypeAlias = tuple[tuple[Action, ...], ...]
"""The forwards and backwards of each coordinate, in order; transfers and updates follow from it."""


class Schedule(CheckedValue, kw_only=True):
    """The order of all stage work in a step: one list of actions for each pp coordinate.

    Stages are numbered along the model. An action is a forward or backward of one stage for one microbatch, a transfer of what
    passes between two stages, or the update. The runtime loops over the lists, the cost model plays them, the report draws them.
    """

    format: Literal[1] = 1
    kind: ScheduleKind
    num_microbatches: Samples
    num_stages: Degree
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]

    def _refusal(self, problem: str) -> ScheduleError:
        return ScheduleError(problem)

    @property
    def num_coordinates(self) -> int:
        """The degree of pp."""
        return len(self.actions)

    @property
    def order(self) -> Order:
        """The compute alone, as the player takes it."""
        return tuple(tuple(action for action in row if action.kind in COMPUTE_KINDS) for row in self.actions)

    def coordinate_of(self, stage: int) -> int:
        """The pp coordinate that a stage lies on."""
        return coordinate_of(stage, self.num_coordinates, self.placement)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward comes in halves."""
        return any(action.kind == "backward_weights" for row in self.actions for action in row)

    def last_backwards(self, coordinate: int) -> dict[int, Action]:
        """For each stage of a coordinate the last action that makes gradients of weights."""
        kinds = ("backward", "backward_weights")
        return {action.stage: action for action in self.actions[coordinate] if action.kind in kinds}
