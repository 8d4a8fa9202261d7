"""The training loop, as every rank runs it.

A step's loss is read one step later, so that the device is never kept waiting for it. Ranks stop together: each adds its
wish to stop (Ctrl-C, time is up) to the step's sums, and all act on the same total. A loss that is not good ends the run, is
left out, or sends the run back to its last checkpoint (`guard.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
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
from meshwright.runtime.gather import all_ranks, is_so_anywhere
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.runtime.replicas import Replicas
from meshwright.runtime.standing import note_step
from meshwright.runtime.step import StepOutput
from meshwright.runtime.undrawn import undrawn
from meshwright.runtime.watch import Recorder
from meshwright.train import checkpoint
from meshwright.train.boards import open_boards
from meshwright.train.data import open_streams
from meshwright.train.folder import RunFolder
from meshwright.train.guard import Guard, Trouble, make_gate
from meshwright.train.live import LiveFile
from meshwright.train.metrics import Metrics, last_loss
from meshwright.train.optimizers import learning_rate, make_optimizer, set_learning_rate
from meshwright.train.position import Progress
from meshwright.train.pretrained import fill, match
from meshwright.train.progress import ProgressView
from meshwright.train.resuming import resume
from meshwright.train.saving import Saving
from meshwright.train.settings import Settings
from meshwright.train.stream import Slice, Stream
from meshwright.train.traces import save_traces, worst_trace
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


class _Going(IntEnum):
    """How a run goes on after a step; the larger counts."""

    ON = 0
    STOP = 1
    BACK = 2


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
        self.metrics = self._open_metrics(first_step) if rank.is_first else None
        self.view = ProgressView(console if rank.is_first else Console(quiet=True), self.settings.steps, first_step)
        self.live = LiveFile(job.folder, rank.number)
        self.guard = Guard(self.settings.faults)
        program.gate = make_gate(self.guard, job.plan, program)
        compared = self.settings.faults.check_replicas_every and program.host is None
        self.replicas = Replicas(program.module, program.mesh) if compared else None
        self.started = time.monotonic()
        self.loss = last_loss(job.folder) if first_step else float("nan")
        self.validation_loss: float | None = None
        self.interrupted = False
        attached = {"plan.json": job.plan.to_json(), "settings.toml": job.settings.to_toml()}
        self.saving = Saving(
            program, job.folder.checkpoints, rank, self.settings.checkpoint, attached, warn=self.view.say
        )

    def _open_metrics(self, first_step: int) -> Metrics:
        return Metrics(self.job.folder, first_step, open_boards(self.settings, self.job.folder, first_step))

    def run(self) -> Outcome:
        try:
            with self.view, self._heed_signals():
                next_step, stopped = self._steps()
                self._check_replicas(next_step - 1)
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
        step = self.first_step
        while step < self.settings.steps:
            note_step(step)
            set_learning_rate(self.program.optimizer, self._rate(step))
            output = self.program.step(self.train.next(), signal=float(self._wants_stop()))
            going = self._finish(*previous) if previous is not None else _Going.ON
            previous = (step, output)
            if going is _Going.STOP or (going is _Going.ON and self._is_pause(step)):
                going = max(going, self._finish(*previous))  # nothing is saved before its loss is known to be good
                previous = None
            if going is _Going.STOP:
                return step + 1, "interrupted" if self.interrupted else "its time is up (max_seconds)"
            if going is _Going.BACK:
                output.wait()
                step, previous = self._roll_back(), None
                continue
            self._between(step)
            step += 1
        return max(self.settings.steps, self.first_step), None

    def _is_pause(self, step: int) -> bool:
        """Whether a validation or a checkpoint follows this step."""
        done = step + 1
        spans = (self._validation_every, self.settings.checkpoint.every)
        return done == self.settings.steps or any(every and done % every == 0 for every in spans)

    @property
    def _validation_every(self) -> int:
        return self.settings.data.validation_every if self.validation is not None else 0

    def _finish(self, step: int, output: StepOutput) -> _Going:
        """Read a step's figures, write them down; returns how the run goes on."""
        trouble = self._trouble(output)
        if output.left_out:
            self._skipped(step, output.loss, trouble)
        elif trouble is not None and trouble.answer == "rollback":
            self.view.say(f"step {step}: {trouble.words}")
            return _Going.BACK
        elif trouble is not None:
            raise RunError(
                f"{trouble.words} at step {step}: lower learning_rate.peak or check the data, and rerun with --find-nan "
                f"to learn which block made it first; checkpoints up to the last good one are in {self.job.folder.checkpoints}"
            )
        else:
            self.loss = output.loss
            self.guard.accept(output.loss)
        self._write(step, output)
        return _Going.STOP if output.signal > 0 else _Going.ON

    def _trouble(self, output: StepOutput) -> Trouble | None:
        """What is wrong with a step's loss; the same answer on all ranks."""
        found = self.guard.trouble(output.loss)
        if self.guard.ranks_must_agree and is_so_anywhere(found is not None) and found is None:
            return Trouble(self.settings.faults.on_spike, "another rank sees a spike of the loss")  # type: ignore[arg-type]
        return found

    def _skipped(self, step: int, loss: float, trouble: Trouble | None) -> None:
        words = trouble.words if trouble is not None else "gradients are not finite"
        self.view.say(f"step {step}: {words}; its update is left out")
        self.guard.note_skip(step, words)

    def _roll_back(self) -> int:
        """To the last checkpoint, but on with the data that comes next; returns the step to go on with."""
        self.saving.settle()
        if checkpoint.latest(self.job.folder.checkpoints) is None:
            raise RunError(
                "there is no checkpoint to roll back to: set checkpoint.every, or stop in place of rolling back"
            )
        progress = checkpoint.restore(self.program, self.graph, self.job.folder.checkpoints, self.rank)
        self.guard.note_rollback(progress.step, "the loss is not good")
        self.program.first_step = progress.step - self.program.num_steps
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = self._open_metrics(progress.step)
        self.view.say(
            f"rolled back to the checkpoint of step {progress.step}; samples {progress.cursor} to {self.train.cursor - 1} of the "
            "stream, all since then, are left out"
        )
        return progress.step

    def _write(self, step: int, output: StepOutput) -> None:
        seconds = output.seconds
        speed = output.tokens / seconds if seconds else 0.0
        memory = device_bytes(self.program.device)
        if self.metrics is not None:
            self.metrics.write(
                step,
                {
                    "loss": None if output.left_out else output.loss,
                    "left_out": True if output.left_out else None,
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
        if output.sampled:
            self.live.write_sample(self.program.trace())
        self.live.write(step, seconds, memory, self.program.watch.sample)
        self.view.show(step, output.loss, speed, memory)

    def _between(self, step: int) -> None:
        """What happens every so many steps, after step number `step`."""
        done = step + 1
        every = self.settings.checkpoint.every
        saves = bool(every and done % every == 0 and done < self.settings.steps)
        compares = self.settings.faults.check_replicas_every
        if compares and (saves or done % compares == 0):
            self._check_replicas(step)
        if self._validation_every and done % self._validation_every == 0:
            self._validate(step)
        if saves:
            self.saving.on_the_way(self._progress(done))

    def _check_replicas(self, step: int) -> None:
        """Before every checkpoint too: none is written of parameters that are not those of all ranks."""
        if self.replicas is not None:
            self.replicas.check(step)

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
