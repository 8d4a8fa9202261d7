"""The History of a program: the steps it ran, and the trace they make together."""

from __future__ import annotations

import statistics
from collections import deque

import torch
import torch.distributed as dist

from meshwright.core.plan import Plan
from meshwright.core.run.trace import Trace, steps_that_count
from meshwright.runtime.environment import describe_environment, peak_resident_bytes
from meshwright.runtime.step import StepOutput, divided, median_parts
from meshwright.runtime.watch import Sample

KEPT_STEPS = 1000
"""Steps a trace tells of one by one, the last ones: a run of weeks must not fill the memory with those before."""


class History:
    def __init__(self) -> None:
        self._outputs: deque[StepOutput] = deque(maxlen=KEPT_STEPS)
        self._num_forgotten = 0

    @property
    def num_steps(self) -> int:
        return self._num_forgotten + len(self._outputs)

    @property
    def outputs(self) -> list[StepOutput]:
        """Of the last steps, the oldest first."""
        return list(self._outputs)

    def add(self, output: StepOutput) -> None:
        self._num_forgotten += len(self._outputs) == KEPT_STEPS
        self._outputs.append(output)

    def clear(self) -> None:
        self._outputs.clear()
        self._num_forgotten = 0

    def trace(self, plan: Plan, device: torch.device, sample: Sample | None) -> Trace:
        """sample: what a recorder saw last."""
        records = tuple(output.record(index) for index, output in enumerate(self._outputs, self._num_forgotten))
        counted = steps_that_count(records)
        seconds = statistics.median(record.seconds for record in counted) if counted else 0.0
        tokens = statistics.fmean(record.tokens for record in counted) if counted else 0.0
        return Trace(
            plan=plan.hash,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            step_seconds=seconds,
            time_seconds=divided(median_parts(counted), sample.time_seconds) if sample else median_parts(counted),
            peak_bytes=sample.memory_bytes.total if sample else None,
            memory_bytes=sample.memory_bytes if sample else None,
            host_bytes=peak_resident_bytes(),
            tokens_per_second=tokens / seconds if seconds else 0.0,
            collectives=sample.collectives if sample else (),
            timeline=sample.timeline if sample else (),
            part_seconds=sample.part_seconds if sample else (),
            sampled_at=sample.started_at if sample else None,
            memory_over_time=sample.memory_over_time if sample else (),
            num_steps=self.num_steps,
            steps=records,
            environment=describe_environment(device),
        )
