"""Whether a resumed run is the run that was saved: one step is replayed, and compared with what was recorded.

    recorded                                               compared
    metrics.jsonl has the step after the checkpoint        its loss and gradient norm, with those of the same step, run again
    the run ended at the checkpoint (`next_loss`)          the loss of the next batch, without dropout and before its update

Under the same plan on the CPU both must be equal bit by bit. Sums over ranks run in another order under another plan, and a GPU
may add in any order: there they must agree within a band.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from pathlib import Path

import torch

from meshwright.core.errors import CheckpointError
from meshwright.core.graph import Precision
from meshwright.models.objective import Batch
from meshwright.runtime.program import Program
from meshwright.training.metrics import values_at
from meshwright.training.position import Progress

BANDS: dict[Precision, float] = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
"""Relative, where sums may run in another order."""


@dataclass(frozen=True)
class Recorded:
    """What a run wrote down about the step after a checkpoint."""

    loss: float | None = None
    gradient_norm: float | None = None
    next_loss: float | None = None

    @property
    def is_step(self) -> bool:
        return self.loss is not None


def recorded_after(progress: Progress, metrics: Path) -> Recorded:
    """To be read before the metrics are cut back to the checkpoint."""
    values = values_at(metrics, progress.step)
    return Recorded(values.get("loss"), values.get("gradient_norm"), progress.next_loss)


def replay(program: Program, batch: Batch, progress: Progress, recorded: Recorded) -> str:
    """Replay one step on the batch that comes next; what was compared, in words. The program must be restored afterwards."""
    if recorded.is_step:
        output = program.step(batch)
        found = {"loss": (output.loss, recorded.loss), "gradient norm": (output.gradient_norm, recorded.gradient_norm)}
        what = f"step {progress.step} was replayed"
    elif recorded.next_loss is not None:
        found = {"loss": (next_loss(program, batch), recorded.next_loss)}
        what = f"the batch of step {progress.step} was evaluated"
    else:
        raise CheckpointError(
            f"nothing was recorded to compare with: the run ended before it had written down step {progress.step}, which follows "
            "the checkpoint; resume without --verify"
        )
    band = _band(program, progress)
    for name, (now, before) in found.items():
        if now is not None and before is not None and not _agrees(now, before, band):
            raise CheckpointError(_mismatch(what, name, now, before, band, program, progress))
    compared = [f"{name} {now!r}" for name, (now, before) in found.items() if before is not None]
    ending = "s" if len(compared) == 1 else ""
    verb = f"agree{ending} within {band:g} with" if band else f"equal{ending}"
    return f"verified: {what}; {' and '.join(compared)} {verb} what was recorded"


def next_loss(program: Program, batch: Batch) -> float:
    """Without dropout, and leaving random states as they are."""
    devices = [program.device] if program.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        return program.evaluate([batch])


def _band(program: Program, progress: Progress) -> float:
    """Zero where everything must be equal."""
    same = program.plan.hash == progress.plan and program.device.type == "cpu"
    return 0.0 if same else BANDS[program.plan.precision]


def _agrees(now: float, before: float, band: float) -> bool:
    return now == before if not band else isclose(now, before, rel_tol=band)


def _mismatch(
    what: str, name: str, now: float, before: float, band: float, program: Program, progress: Progress
) -> str:
    wanted = "and must be equal" if not band else f"and must agree within {band:g}"
    hint = "the data, the model's code, or the versions of torch or Meshwright are not those of then"
    if program.plan.world != progress.num_ranks:
        hint += f"; or the model has dropout, which other ranks draw anew: verify it on {progress.num_ranks} ranks"
    return f"this is not the run that was saved: {what}, and its {name} is {now!r}; {before!r} was recorded, {wanted}: {hint}"
