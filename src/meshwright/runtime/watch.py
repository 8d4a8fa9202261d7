"""A Watch: which steps a recorder sees, and what it saw last.

Recording a step costs C seconds more than a plain step of T seconds takes. The next sample comes n steps later, with

    n = ⌈C / (SHARE · T)⌉        so that recording costs at most SHARE of the time, paid back before the next sample

C and T are measured at each sample; ranks take the largest n of all of them, so that they record the same steps. Between
samples no hook is installed and no region is named: a plain step costs what it costs without a recorder.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from meshwright.core.collective import Collective
from meshwright.core.estimate import MemoryParts, TimeParts
from meshwright.core.run.trace import Interval, MemoryPoint, PartSeconds
from meshwright.models.objective import Batch
from meshwright.runtime.step import StepOutput

if TYPE_CHECKING:
    from meshwright.runtime.program import Program

SAMPLED_STEP = 2
"""The first step a recorder watches: the ones before still allocate what later ones reuse."""
SHARE = 0.015
"""Of the time of plain steps, that recording may cost. The promise is 3 %; half is left for how samples vary."""


@dataclass(frozen=True)
class Sample:
    """What a recorder saw of one step on one rank."""

    time_seconds: TimeParts
    memory_bytes: MemoryParts
    """At the peak."""
    collectives: tuple[Collective, ...]
    timeline: tuple[Interval, ...] = ()
    part_seconds: tuple[PartSeconds, ...] = ()
    memory_over_time: tuple[MemoryPoint, ...] = ()
    started_at: float | None = None
    """Seconds of the host's clock since 1970."""


class Recorder(Protocol):
    """Runs one step and says what it saw; nothing where that could not be written down."""

    def record(
        self, program: Program, batch: Batch, run: Callable[[], StepOutput]
    ) -> tuple[StepOutput, Sample | None]: ...


class Watch:
    """Made by `apply` for one Program. Without a recorder it never listens."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.sample: Sample | None = None
        self.listening = False
        self.next_step = SAMPLED_STEP
        self._recorder = recorder

    def region(self, name: str) -> AbstractContextManager[Any]:
        """A named stretch in the profile of a sampled step; nothing in other steps."""
        return record_function(f"meshwright/{name}") if self.listening else nullcontext()

    def wants(self, step: int) -> bool:
        return self._recorder is not None and step == self.next_step

    def record(
        self, program: Program, batch: Batch, run: Callable[[], StepOutput], earlier: list[StepOutput]
    ) -> StepOutput:
        """Run a step under the recorder, and decide which step is the next."""
        assert self._recorder is not None
        plain = statistics.median(output.seconds for output in earlier[1:] if not output.sampled)  # the first warms up
        _settle(program.device)
        started = time.perf_counter()
        self.listening = True
        try:
            output, sample = self._recorder.record(program, batch, run)
        finally:
            self.listening = False
        self.sample = sample or self.sample
        output.sampled = sample is not None
        spent = time.perf_counter() - started
        cost = spent - min(plain, output.seconds)  # a plain step that was slow by chance does not make recording free
        self.next_step += _slowest_rank(stride(cost, plain), program.device)
        return output


def stride(cost_seconds: float, plain_seconds: float) -> int:
    """Steps from one sample to the next."""
    return max(1, math.ceil(cost_seconds / (SHARE * max(plain_seconds, 1e-9))))


def _settle(device: torch.device) -> None:
    """What was queued before the step is not part of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def align_ranks(device: torch.device) -> None:
    """Ranks start their profilers at different speeds: without this the first collective would show it as waiting."""
    _slowest_rank(0, device)


def _slowest_rank(steps: int, device: torch.device) -> int:
    if dist.get_world_size() == 1:
        return steps
    tensor = torch.tensor(steps, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)
