"""The training loop, as every rank runs it.

A step's loss is read one step later, so that the device is never kept waiting for it. Ranks stop together: each adds its
wish to stop (Ctrl-C, time is up) to the step's sums, and all act on the same total. A loss that is not good ends the run, is
left out, or sends the run back to its last checkpoint (`guard.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from meshwright.core.errors import RunError
from meshwright.core.run.trace import Trace
from meshwright.runtime.gather import is_so_anywhere
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.runtime.replicas import Replicas
from meshwright.runtime.standing import note_step
from meshwright.runtime.step import StepOutput
from meshwright.training import checkpoint
from meshwright.training.guard import Guard, Trouble, make_gate
from meshwright.training.job import Job, Outcome
from meshwright.training.journal import Journal
from meshwright.training.metrics import last_loss
from meshwright.training.optimizers import set_learning_rate
from meshwright.training.places import elsewhere_of, places_of
from meshwright.training.position import Progress
from meshwright.training.saving import Home, Saving
from meshwright.training.stopping import StopWish
from meshwright.training.stream import Stream
from meshwright.training.traces import save_traces, worst_trace
from meshwright.training.verify import next_loss


@dataclass(frozen=True)
class Start:
    """Where a run begins, or goes on."""

    graph: str
    """Identity of the module before it was spread."""
    train: Stream
    validation: Stream | None
    step: int


class _Going(IntEnum):
    """How a run goes on after a step; the larger counts."""

    ON = 0
    STOP = 1
    BACK = 2


class Loop:
    """One run on one rank, from its first step to its outcome."""

    def __init__(self, job: Job, rank: Rank, program: Program, start: Start, console: Console) -> None:
        self.job, self.rank, self.program, self.start = job, rank, program, start
        self.settings = job.settings
        program.first_step = start.step
        self.journal = Journal(job, rank, program, start.step, console)
        self.guard = Guard(self.settings.faults)
        program.gate = make_gate(self.guard, job.plan, program)
        self.replicas = Replicas(program) if self.settings.faults.check_replicas_every else None
        self.stop_wish = StopWish(self.settings.max_seconds)
        self.loss = last_loss(job.folder) if start.step else float("nan")
        self.validation_loss: float | None = None
        self.unread: tuple[int, StepOutput] | None = None
        """The last step, while nobody has asked for its loss."""
        attached = {"plan.json": job.plan.to_json(), "settings.toml": self.settings.to_toml()}
        home = Home(job.folder.checkpoints, elsewhere_of(self.settings, job.folder, job.run), job.keep_home)
        self.saving = Saving(program, home, rank, self.settings.checkpoint, attached, say=self.journal.say)

    def run(self) -> Outcome:
        try:
            with self.journal.shown(), self.stop_wish.heed_signals():
                next_step, stopped = self._steps()
                self._check_replicas(next_step - 1)
                saved = self._save_last(next_step)
            traces = all_ranks(self.program.trace(), Trace)
        finally:
            self.saving.close()
            self.journal.close()
        trace = worst_trace(traces)
        if self.rank.is_first:
            self._save_traces(traces, trace)
        return Outcome(trace, self.loss, self.validation_loss, next_step, stopped, saved)

    def _save_traces(self, traces: list[Trace], worst: Trace) -> None:
        """A disk that is full loses them, not the run: its last checkpoint is written by now."""
        try:
            save_traces(traces, self.job.folder)
            worst.save(self.job.folder.trace)
        except OSError as error:
            self.journal.say(f"warning: the trace could not be written to {self.job.folder.path}: {error}")

    def _steps(self) -> tuple[int, str | None]:
        """Train to the last step, or until the ranks agree to stop; returns the next step and why it stopped."""
        step = self.start.step
        while step < self.settings.steps:
            output = self._train(step)
            going = self._settle(step, output)
            if going is _Going.STOP:
                self._validate_if_due(step)
                return step + 1, self.stop_wish.reason
            if going is _Going.BACK:
                output.wait()
                step = self._roll_back()
            else:
                self._between(step)
                step += 1
        return max(self.settings.steps, self.start.step), None

    def _train(self, step: int) -> StepOutput:
        note_step(step)
        set_learning_rate(self.program.optimizer, self.job.learning_rate(step))
        return self.program.step(self.start.train.next(), signal=float(self.stop_wish.is_there()))

    def _settle(self, step: int, output: StepOutput) -> _Going:
        """Read the loss of the step before, and of this one only where it is the last or a pause follows."""
        going = self._read()
        self.unread = (step, output)
        if going is _Going.STOP or (going is _Going.ON and self._is_pause(step)):
            going = max(going, self._read())  # nothing is saved before its loss is known to be good
        return going

    def _is_pause(self, step: int) -> bool:
        """Whether a validation or a checkpoint follows this step."""
        done = step + 1
        spans = (self._validation_every, self.settings.checkpoint.every)
        is_due = any(every and done % every == 0 for every in spans)
        return is_due or done == self.settings.steps or self.saving.is_due(done)

    @property
    def _validation_every(self) -> int:
        return self.settings.data.validation_every if self.start.validation is not None else 0

    def _read(self) -> _Going:
        """Judge the figures of the unread step and write them down; returns how the run goes on."""
        if self.unread is None:
            return _Going.ON
        (step, output), self.unread = self.unread, None
        trouble = self._trouble(output)
        if output.left_out:
            self._skip(step, trouble)
        elif trouble is not None and trouble.answer == "rollback":
            self.journal.say(f"step {step}: {trouble.words}")
            return _Going.BACK
        elif trouble is not None:
            raise RunError(
                f"{trouble.words} at step {step}: lower learning_rate.peak or check the data, and rerun with --find-nan "
                f"to learn which block made it first; checkpoints up to the last good one are in {self.job.folder.checkpoints}"
            )
        else:
            self.loss = output.loss
            self.guard.accept(output.loss)
        self.journal.write(step, output)
        return _Going.STOP if output.signal > 0 else _Going.ON

    def _trouble(self, output: StepOutput) -> Trouble | None:
        """What is wrong with a step's loss; the same answer on all ranks."""
        found = self.guard.trouble(output.loss)
        if self.guard.ranks_must_agree and is_so_anywhere(found is not None) and found is None:
            return Trouble(self.settings.faults.on_spike, "another rank sees a spike of the loss")  # type: ignore[arg-type]
        return found

    def _skip(self, step: int, trouble: Trouble | None) -> None:
        words = trouble.words if trouble is not None else "gradients are not finite"
        self.journal.say(f"step {step}: {words}; its update is left out")
        self.guard.note_skip(step, words)

    def _roll_back(self) -> int:
        """To the last checkpoint, but on with the data that comes next; returns the step to go on with."""
        self.unread = None
        self.saving.settle()
        checkpoints = places_of(self.job.folder)
        if checkpoint.latest(checkpoints) is None:
            raise RunError(
                "there is no checkpoint to roll back to: set checkpoint.every, or stop in place of rolling back"
            )
        progress = checkpoint.restore(self.program, self.start.graph, checkpoints, self.rank, run=self.job.run)
        self.guard.note_rollback(progress.step, "the loss is not good")
        self.program.first_step = progress.step - self.program.num_steps
        self.journal.go_back(progress.step)
        self.journal.say(
            f"rolled back to the checkpoint of step {progress.step}; samples {progress.cursor} to {self.start.train.cursor - 1} "
            "of the stream, all since then, are left out"
        )
        return progress.step

    def _between(self, step: int) -> None:
        """What happens every so many steps, after step number `step`."""
        done = step + 1
        every = self.settings.checkpoint.every
        is_due = bool(every and done % every == 0) or self.saving.is_due(done)
        saves = is_due and done < self.settings.steps
        compares = self.settings.faults.check_replicas_every
        if compares and (saves or done % compares == 0):
            self._check_replicas(step)
        self._validate_if_due(step)
        if saves:
            self.saving.on_the_way(self._progress(done))

    def _check_replicas(self, step: int) -> None:
        """Before every checkpoint too: none is written of parameters that are not those of all ranks."""
        if self.replicas is not None:
            self.replicas.check(step)

    def _validate_if_due(self, step: int) -> None:
        """Also where the run stops here: a resumed one begins behind it."""
        if self._validation_every and (step + 1) % self._validation_every == 0:
            self._validate(step)

    def _validate(self, step: int) -> None:
        validation = self.start.validation
        assert validation is not None
        self.program.sync_buffers()
        validation.seek(0)
        batches = (validation.next() for _ in range(self.settings.data.validation_batches))
        self.validation_loss = self.program.evaluate(batches)
        self.journal.write_validation(step, self.validation_loss)

    def _save_last(self, next_step: int) -> Path:
        """What the next batch's loss would be goes along, for a resumed run to compare with."""
        progress = self._progress(next_step)
        self.program.sync_buffers()
        expected = next_loss(self.program, self.start.train.next())
        return self.saving.last(replace(progress, next_loss=expected), lambda: self.stop_wish.num_signals)

    def _progress(self, next_step: int) -> Progress:
        return Progress(
            step=next_step,
            cursor=self.start.train.cursor,
            plan=self.job.plan.hash,
            graph=self.start.graph,
            num_ranks=self.rank.num_ranks,
            num_steps=self.settings.steps,
            learning_rate=self.job.learning_rate(next_step),
            run=self.job.run,
        )
