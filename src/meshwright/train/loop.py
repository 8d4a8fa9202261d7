"""The training loop, as every rank runs it.

A step's loss is read one step later, so that the device is never kept waiting for it. Ranks stop together: each adds its
wish to stop (Ctrl-C, time is up) to the step's sums, and all act on the same total.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from rich.console import Console
from torch import nn

from meshwright.core.errors import RunError
from meshwright.core.graph import identity
from meshwright.core.plan import Plan
from meshwright.core.trace import Trace
from meshwright.models.parameters import list_parameters
from meshwright.models.source import ModelSource, resolve
from meshwright.runtime.apply import apply
from meshwright.runtime.deferred import building
from meshwright.runtime.environment import device_bytes
from meshwright.runtime.gather import all_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.runtime.step import StepOutput
from meshwright.runtime.undrawn import undrawn
from meshwright.runtime.watch import Recorder
from meshwright.train.boards import open_boards
from meshwright.train.data import open_streams
from meshwright.train.folder import RunFolder
from meshwright.train.live import LiveFile
from meshwright.train.metrics import Metrics
from meshwright.train.optimizers import learning_rate, make_optimizer, set_learning_rate
from meshwright.train.position import Progress
from meshwright.train.pretrained import fill, match
from meshwright.train.progress import ProgressView
from meshwright.train.resuming import resume
from meshwright.train.saving import Saving
from meshwright.train.settings import Settings
from meshwright.train.stream import Slice, Stream
from meshwright.train.verify import next_loss
from meshwright.train.weights_folder import WeightsFolder


@dataclass(frozen=True)
class Job:
    """What a run was told: everything is decided by now."""

    settings: Settings
    plan: Plan
    folder: RunFolder
    resume: bool = False
    verify: bool = False
    """Whether a resumed run first replays a step and compares."""


@dataclass(frozen=True)
class Outcome:
    trace: Trace
    loss: float
    validation_loss: float | None
    num_steps: int
    stopped: str | None
    """Why it ended before its last step, if it did."""
    checkpoint: Path


def run(job: Job, rank: Rank, recorder: Recorder | None, console: Console) -> Outcome:
    """Train, and leave metrics, trace and a checkpoint in the run folder. Every rank calls it."""
    torch.manual_seed(job.settings.seed)
    source = resolve(job.settings.model)
    weights = None if job.resume else job.settings.weights
    with building(job.plan), undrawn() if weights else nullcontext():
        module = source.build()
    graph = identity(list_parameters(module))
    matched = match(WeightsFolder(weights), module) if weights else None
    program = build_program(job, module, source, rank, recorder)
    if matched is not None:
        imported = fill(program, matched)
        if rank.is_first:
            console.print(imported.describe(matched), highlight=False)
    torch.manual_seed(job.settings.seed + program.mesh.get_local_rank("dp"))  # replicas draw their own dropout
    part = Slice(program.mesh.get_local_rank("dp"), job.plan.mesh.dp)
    train, validation = open_streams(job.settings.data, source, job.plan.global_batch, part, job.settings.seed)
    first_step = 0
    if job.resume:
        first_step = resume(program, graph, train, rank, job.folder, job.settings, job.verify, console)
    return _Loop(job, rank, program, graph, train, validation, first_step, console).run()


def build_program(job: Job, module: nn.Module, source: ModelSource, rank: Rank, recorder: Recorder | None) -> Program:
    clip_norm = job.settings.optimizer.clip_norm
    return apply(
        module,
        job.plan,
        optimizer=make_optimizer(module, job.settings),
        objective=source.objective,
        max_norm=None if clip_norm == "none" else clip_norm,
        recorder=recorder,
        device=rank.device,
        find_nan=job.settings.find_nan,
        host_link=job.settings.host_link,
    )


class _Loop:
    """One run on one rank, from its first step to its outcome."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        program: Program,
        graph: str,
        train: Stream,
        validation: Stream | None,
        first_step: int,
        console: Console,
    ) -> None:
        self.job, self.rank, self.program, self.graph = job, rank, program, graph
        self.settings = job.settings
        self.train, self.validation = train, validation
        self.first_step = program.first_step = first_step
        self.metrics = (
            Metrics(job.folder, first_step, open_boards(self.settings, job.folder, first_step))
            if rank.is_first
            else None
        )
        self.view = ProgressView(console if rank.is_first else Console(quiet=True), self.settings.steps, first_step)
        self.live = LiveFile(job.folder, rank.number)
        self.started = time.monotonic()
        self.loss = float("nan")
        self.validation_loss: float | None = None
        self.interrupted = False
        attached = {"plan.json": job.plan.to_json(), "settings.toml": job.settings.to_toml()}
        self.saving = Saving(
            program, job.folder.checkpoints, rank, self.settings.checkpoint, attached, warn=self.view.say
        )

    def run(self) -> Outcome:
        try:
            with self.view, self._heed_signals():
                next_step, stopped = self._steps()
                saved = self._save_last(next_step)
            traces = all_ranks(self.program.trace())
        finally:
            self.saving.close()
            if self.metrics is not None:
                self.metrics.close()
        trace = worst_trace(traces)
        if self.rank.is_first:
            save_traces(traces, self.job.folder)
            trace.save(self.job.folder.trace)
        return Outcome(trace, self.loss, self.validation_loss, next_step, stopped, saved)

    def _steps(self) -> tuple[int, str | None]:
        """Train to the last step, or until the ranks agree to stop; returns the next step and why it stopped."""
        previous: tuple[int, StepOutput] | None = None
        for step in range(self.first_step, self.settings.steps):
            set_learning_rate(self.program.optimizer, self._rate(step))
            output = self.program.step(self.train.next(), signal=float(self._wants_stop()))
            stop = previous is not None and self._finish(*previous)
            previous = (step, output)
            if stop or self._is_pause(step):  # nothing is saved before its loss is known to be a number
                stop = self._finish(*previous) or stop
                previous = None
            if stop:
                return step + 1, "interrupted" if self.interrupted else "its time is up (max_seconds)"
            self._between(step)
        if previous is not None:
            self._finish(*previous)
        return max(self.settings.steps, self.first_step), None

    def _is_pause(self, step: int) -> bool:
        """Whether a validation or a checkpoint follows this step."""
        return any(
            every and (step + 1) % every == 0 for every in (self._validation_every, self.settings.checkpoint.every)
        )

    @property
    def _validation_every(self) -> int:
        return self.settings.data.validation_every if self.validation is not None else 0

    def _finish(self, step: int, output: StepOutput) -> bool:
        """Read a step's figures, write them down; returns whether the ranks want to stop."""
        self.loss = output.loss
        if not math.isfinite(self.loss):
            raise RunError(
                f"the loss is {self.loss} at step {step}: lower learning_rate.peak or check the data, and rerun with --find-nan "
                f"to learn which block made it first; checkpoints up to the last good one are in {self.job.folder.checkpoints}"
            )
        seconds = output.seconds
        speed = output.tokens / seconds if seconds else 0.0
        memory = device_bytes(self.program.device)
        if self.metrics is not None:
            self.metrics.write(
                step,
                {
                    "loss": self.loss,
                    "learning_rate": self._rate(step),
                    "gradient_norm": output.gradient_norm,
                    "seconds": seconds,
                    "tokens_per_second": speed,
                    "memory_bytes": memory,
                    "dropped_tokens": output.dropped_tokens if output.routed_tokens else None,
                    "routed_tokens": output.routed_tokens or None,
                },
            )
            if output.sampled and self.program.watch.sample is not None:
                self.metrics.show_sample(step, self.program.watch.sample)
        self.live.write(step, seconds, memory, self.program.watch.sample)
        self.view.show(step, self.loss, speed, memory)
        return output.signal > 0

    def _between(self, step: int) -> None:
        """What happens every so many steps, after step number `step`."""
        done = step + 1
        every = self.settings.checkpoint.every
        if self._validation_every and done % self._validation_every == 0:
            self._validate(step)
        if every and done % every == 0 and done < self.settings.steps:
            self.saving.on_the_way(self._progress(done))

    def _validate(self, step: int) -> None:
        assert self.validation is not None
        self.program.sync_buffers()
        self.validation.seek(0)
        batches = (self.validation.next() for _ in range(self.settings.data.validation_batches))
        self.validation_loss = self.program.evaluate(batches)
        if self.metrics is not None:
            self.metrics.write(step, {"validation_loss": self.validation_loss})
        self.view.say(f"step {step + 1}  validation loss {self.validation_loss:.3f}")

    def _save_last(self, next_step: int) -> Path:
        """What the next batch's loss would be goes along, for a resumed run to compare with."""
        progress = self._progress(next_step)
        self.program.sync_buffers()
        expected = next_loss(self.program, self.train.next())
        return self.saving.last(replace(progress, next_loss=expected))

    def _progress(self, next_step: int) -> Progress:
        return Progress(
            step=next_step,
            cursor=self.train.cursor,
            plan=self.job.plan.hash,
            graph=self.graph,
            num_ranks=self.rank.num_ranks,
            num_steps=self.settings.steps,
            learning_rate=self._rate(next_step),
        )

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.settings.steps, self.settings.learning_rate)

    def _wants_stop(self) -> bool:
        limit = self.settings.max_seconds
        return self.interrupted or (limit is not None and time.monotonic() - self.started > limit)

    @contextmanager
    def _heed_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run within two steps, once all ranks know, with a checkpoint."""

        def interrupt(*_: Any) -> None:
            self.interrupted = True

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def worst_trace(traces: Sequence[Trace]) -> Trace:
    """The trace of the rank with the highest peak; the same on all ranks."""
    return max(traces, key=lambda trace: (trace.peak_bytes or 0, -trace.rank))


def save_traces(traces: Sequence[Trace], folder: RunFolder) -> None:
    """One file a rank; those of an earlier run on more ranks go."""
    folder.traces.mkdir(exist_ok=True)
    for old in folder.traces.glob("rank-*.json"):
        old.unlink()
    for trace in traces:
        trace.save(folder.trace_of(trace.rank))
