"""A Journal: what a run says of itself while it goes on. The first rank writes metrics and draws a bar, every rank a live file."""

from __future__ import annotations

from contextlib import AbstractContextManager

from rich.console import Console

from meshwright.runtime.environment import device_bytes
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.runtime.step import StepOutput
from meshwright.training.boards import open_boards
from meshwright.training.job import Job
from meshwright.training.live import LiveFile
from meshwright.training.metrics import Metrics
from meshwright.training.progress import ProgressView


class Journal:
    def __init__(self, job: Job, rank: Rank, program: Program, first_step: int, console: Console) -> None:
        self.job, self.program = job, program
        self._metrics = self._open_metrics(first_step) if rank.is_first else None
        self._view = ProgressView(console if rank.is_first else Console(quiet=True), job.settings.steps, first_step)
        self._live = LiveFile(job.folder, rank.number)

    def shown(self) -> AbstractContextManager[object]:
        """The bar, as long as the run goes on."""
        return self._view

    def say(self, text: str) -> None:
        self._view.say(text)

    def write(self, step: int, output: StepOutput) -> None:
        seconds = output.seconds
        speed = output.tokens / seconds if seconds else 0.0
        memory = device_bytes(self.program.device)
        sample = self.program.watch.sample
        self._write_metrics(step, output, speed, memory)
        if output.sampled:
            self._live.write_sample(self.program.trace())
        self._live.write(step, seconds, memory, sample)
        self._view.show(step, output.loss, speed, memory)

    def write_validation(self, step: int, loss: float) -> None:
        if self._metrics is not None:
            self._metrics.write(step, {"validation_loss": loss})
        self.say(f"step {step + 1}  validation loss {loss:.3f}")

    def go_back(self, step: int) -> None:
        """The run goes on from that step: what was written of it and later ones is dropped."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = self._open_metrics(step)

    def close(self) -> None:
        if self._metrics is not None and not self._metrics.close():
            self.say(f"warning: {self.job.folder.metrics} lacks the last steps: the disk did not take them")

    def _open_metrics(self, first_step: int) -> Metrics:
        job = self.job
        return Metrics(job.folder, first_step, open_boards(job.settings, job.folder, first_step))

    def _write_metrics(self, step: int, output: StepOutput, speed: float, memory: int) -> None:
        if self._metrics is None:
            return
        self._metrics.write(
            step,
            {
                "loss": None if output.left_out else output.loss,
                "left_out": True if output.left_out else None,
                "learning_rate": self.job.learning_rate(step),
                "gradient_norm": output.gradient_norm,
                "seconds": output.seconds,
                "tokens_per_second": speed,
                "memory_bytes": memory,
                "dropped_tokens": output.dropped_tokens if output.routed_tokens else None,
                "routed_tokens": output.routed_tokens or None,
            },
        )
        sample = self.program.watch.sample
        if output.sampled and sample is not None:
            self._metrics.show_sample(step, sample)
