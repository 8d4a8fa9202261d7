"""What a step gave, and the figures of many steps put together."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
from torch import Tensor

from meshwright.core.estimate import TimeParts
from meshwright.core.run.trace import StepRecord
from meshwright.runtime.clock import Mark

PARTS = {
    "backward_inputs": "backward", "backward_weights": "backward",
    "receive_forward": "bubble", "receive_backward": "bubble", "send_forward": "transfer", "send_backward": "transfer",
}  # fmt: skip
"""Action → the part of the step it counts as, where that has another name. A receive waits: for the other stage's work, and
then for the message itself, which cannot be told apart here."""


@dataclass
class StepOutput:
    """What a step gave. Reading `loss` waits for the ranks' sum; until then nothing does."""

    _sums: Tensor
    """Loss times tokens, signals, choices of experts that were dropped and all choices, summed over ranks when `_work` is done."""
    _count: Tensor
    """Tokens of the global batch."""
    _work: Any
    _marks: list[tuple[str, Mark]]
    """A mark after each action, with the action's name; the first is the start."""
    _norm: Tensor | None = None
    sampled: bool = False
    left_out: bool = False
    """Whether a gate kept the update back."""
    _resolved: tuple[float, ...] | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Until the ranks' sum is there."""
        if self._work is not None:
            self._work.wait()

    @property
    def tokens(self) -> int:
        """Of the global batch: label tokens that count, or samples."""
        return int(self._count)

    @property
    def loss(self) -> float:
        """Mean over the tokens of the global batch."""
        return self._values()[0]

    @property
    def signal(self) -> float:
        """Sum of the signals the ranks gave to this step."""
        return self._values()[1]

    @property
    def dropped_tokens(self) -> int:
        """Choices of experts that found no room, over all ranks, blocks and microbatches; a token may choose two."""
        return int(self._values()[2])

    @property
    def routed_tokens(self) -> int:
        """All choices of experts; 0 where the model counts none."""
        return int(self._values()[3])

    @property
    def gradient_norm(self) -> float | None:
        """Global norm before clipping, infinite where fp16 gradients were and the update was left out; None where nothing clips."""
        return None if self._norm is None else float(self._norm)

    @property
    def seconds(self) -> float:
        """Of the whole step, on this rank."""
        return self._marks[0][1].seconds_until(self._marks[-1][1])

    @property
    def time_seconds(self) -> TimeParts:
        """The step by part, on this rank."""
        parts: dict[str, float] = {}
        for (_, start), (name, end) in pairwise(self._marks):
            part = PARTS.get(name, name)
            parts[part] = parts.get(part, 0.0) + start.seconds_until(end)
        return TimeParts(**parts)

    def record(self, index: int) -> StepRecord:
        """The same as a value."""
        return StepRecord(
            step=index,
            loss=self.loss,
            seconds=self.seconds,
            time_seconds=self.time_seconds,
            tokens=self.tokens,
            sampled=self.sampled,
        )

    def _values(self) -> tuple[float, ...]:
        if self._resolved is None:
            self.wait()
            total, *others = self._sums.tolist()
            self._resolved = (total / max(float(self._count), 1.0), *others)
        return self._resolved


def median_parts(records: tuple[StepRecord, ...]) -> TimeParts:
    """The median of each part over the steps."""
    if not records:
        return TimeParts()
    names = TimeParts.__struct_fields__
    return TimeParts(**{name: statistics.median(getattr(r.time_seconds, name) for r in records) for name in names})


def divided(plain: TimeParts, sampled: TimeParts) -> TimeParts:
    """The parts of plain steps, each divided by the shares that waiting and recompute had of it in a sampled step.

    A recorder slows a step down, so that its seconds do not count; what share of a part was what, does.
    """
    forward, backward = _shares(sampled.forward_total), _shares(sampled.backward_total)
    update = _shares(sampled.update + sampled.other)
    return msgspec.structs.replace(
        plain,
        forward=plain.forward * (1 - forward(sampled.exposed_gather)),
        exposed_gather=plain.forward * forward(sampled.exposed_gather),
        recompute=plain.backward * backward(sampled.recompute),
        backward=plain.backward * (1 - backward(sampled.recompute + sampled.exposed_reduce)),
        exposed_reduce=plain.backward * backward(sampled.exposed_reduce),
        update=plain.update * (1 - update(sampled.other)),
        other=plain.update * update(sampled.other),
    )


def _shares(total: float) -> Callable[[float], float]:
    """What share of a total a part is; none where there is no total."""
    return lambda part: part / total if total else 0.0
