"""A run goes on from its newest whole checkpoint, under the plan of now; if asked to, only when a replayed step is the same."""

from __future__ import annotations

from rich.console import Console

from meshwright.runtime.messages.exchange import from_first
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.training import checkpoint
from meshwright.training.job import Job
from meshwright.training.optimizers import set_learning_rate
from meshwright.training.places import places_of
from meshwright.training.position import Progress
from meshwright.training.stream import Stream
from meshwright.training.verify import Recorded, recorded_after, replay


def resume(job: Job, rank: Rank, program: Program, graph: str, train: Stream, console: Console) -> int:
    """Every rank calls it; returns the step that comes next."""

    def say(text: str) -> None:
        if rank.is_first:
            console.print(text, highlight=False, soft_wrap=True)

    def restore() -> Progress:
        progress = checkpoint.restore(program, graph, places_of(job.folder), rank, say, job.run)
        train.seek(progress.cursor)
        program.first_step = progress.step
        return progress

    progress = restore()
    rate = job.learning_rate(progress.step)
    if progress.learning_rate not in (None, rate):
        say(_other_rate(progress, rate, job.settings.steps))
    if job.verify:
        recorded = from_first(lambda: recorded_after(progress, job.folder.metrics), Recorded)
        set_learning_rate(program.optimizer, rate)
        say(replay(program, train.next(), progress, recorded))
        program.forget_steps()
        restore()
    return progress.step


def _other_rate(progress: Progress, rate: float, num_steps: int) -> str:
    return (
        f"the learning rate of step {progress.step} is {rate:g}, and would have been {progress.learning_rate:g}: its schedule "
        f"counts to {num_steps} steps now, and counted to {progress.num_steps}"
    )
