"""Runs of several plans on the same data, judged: who is fastest, by how much, and whether that is more than noise.

    s        median seconds of a step, over all repeats of a run
    margin   = s(second) / s(first) - 1
    noise    = the largest spread of a run's repeats, (max - min) / min of their medians, of the two that are compared;
               with one repeat: of the medians of the two halves of its steps
    agree    = the largest |loss - loss of the reference| / |loss of the reference| over the first steps     -> loss_difference

A margin that does not exceed the noise is no margin.                                                        -> judge
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.histogram import histogram_of, shared_edges
from meshwright.report.run import Run, median, percentile

COMPARED_STEPS = 10
"""Of the losses: later ones drift apart by rounding alone."""
LOSS_TOLERANCE = 0.01
FIRST_TOLERANCE = 1e-3
"""Of the first step's loss, before any update could make rounding grow."""


@dataclass(frozen=True)
class Judgement:
    first: Run
    second: Run
    margin: float
    noise: float

    @property
    def exceeds_noise(self) -> bool:
        return self.margin > self.noise

    def __str__(self) -> str:
        beyond = "more than" if self.exceeds_noise else "not more than"
        repeated = self.first.repeats or self.second.repeats
        between = "between repeats" if repeated else "between the two halves of a run's steps"
        return (
            f"{self.first.name} is fastest: {self.margin:.1%} ahead of {self.second.name}, which is {beyond} the noise "
            f"{between} ({self.noise:.1%})"
        )


def judge(runs: Sequence[Run]) -> Judgement | None:
    """The fastest run against the next; None where there are not two that ran."""
    timed = sorted((run for run in runs if run.step_seconds), key=lambda run: median(run.step_seconds) or 0.0)
    if len(timed) < 2:
        return None
    first, second = timed[:2]
    one, other = statistics.median(first.step_seconds), statistics.median(second.step_seconds)
    return Judgement(first, second, other / one - 1, max(noise(first), noise(second)))


def noise(run: Run) -> float:
    """How much the medians of repeats differ."""
    groups = [group for group in (run.own_seconds, *run.repeats) if group]
    if len(groups) == 1:
        half = len(groups[0]) // 2
        groups = [group for group in (groups[0][:half], groups[0][half:]) if group]
    medians = [statistics.median(group) for group in groups]
    return max(medians) / min(medians) - 1


def loss_difference(run: Run, reference: Run, num_steps: int = COMPARED_STEPS) -> float | None:
    """How far the losses of the first steps lie apart, relative to the reference; None where a loss is missing."""
    ours, theirs = (_losses(one) for one in (run, reference))
    steps = [step for step in sorted(theirs) if step in ours][:num_steps]
    return max((abs(ours[step] - theirs[step]) / (abs(theirs[step]) or 1.0) for step in steps), default=None)


def loss_words(runs: Sequence[Run]) -> str:
    """Which runs do not follow the first: from the first step on, or later, when rounding has grown; nothing where all do."""
    reference = runs[0]
    apart = [run for run in runs if (loss_difference(run, reference) or 0.0) > LOSS_TOLERANCE]
    wrong = [run.name for run in apart if (loss_difference(run, reference, 1) or 0.0) > FIRST_TOLERANCE]
    drifting = [run.name for run in apart if run.name not in wrong]
    words = []
    if wrong:
        words.append(
            f"the losses of {', '.join(wrong)} differ from {reference.name} from the first step on: they do not compute the same; "
            "batch norm needs sync_batch_norm, see `meshwright parity`"
        )
    if drifting:
        words.append(
            f"the losses of {', '.join(drifting)} begin like {reference.name}'s and drift apart by over {LOSS_TOLERANCE:.0%} in "
            f"{COMPARED_STEPS} steps: rounding grows fast in this model; a larger batch or a smaller learning rate shows it"
        )
    return "; ".join(words)


def agreement_words(runs: Sequence[Run]) -> str:
    """How well the losses agree; nothing where they do not, for then there is a warning."""
    differences = [loss_difference(run, runs[0]) for run in runs[1:]]
    known = [difference for difference in differences if difference is not None]
    if not known or loss_words(runs):
        return ""
    return f"Losses agree within {max(known):.1g} of {runs[0].name}'s over the first {COMPARED_STEPS} steps."


def said_about(runs: Sequence[Run]) -> tuple[str, ...]:
    """Sentences about all runs together: who won, whether losses agree, what else the runs show."""
    judgement, apart = judge(runs), loss_words(runs)
    return (
        *([f"{judgement}."] if judgement else []),
        *([f"Warning: {apart}."] if apart else []),
        *([words] if (words := agreement_words(runs)) else []),
        *findings(runs),
    )


def _losses(run: Run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.metrics if "loss" in line}


def rows_of(runs: Sequence[Run], epoch_steps: int | None) -> list[dict[str, Any]]:
    """All runs as plain figures; losses are compared with the first's."""
    edges = shared_edges(runs)
    return [{**row_of(run, runs[0], epoch_steps), "histogram": histogram_of(run, edges)} for run in runs]


def row_of(run: Run, reference: Run, epoch_steps: int | None) -> dict[str, Any]:
    """One run as plain figures."""
    trace, seconds = run.worst, run.step_seconds
    mean = statistics.fmean(seconds) if seconds else None
    return {
        "name": run.name,
        "plan": run.plan,
        "num_ranks": run.plan.world,
        "repeats": 1 + len(run.repeats),
        "step_seconds": {
            "mean": mean,
            "median": median(seconds),
            "p95": percentile(seconds, 0.95) if seconds else None,
            "all": list(seconds),
        },
        "noise": noise(run) if seconds else None,
        "epoch_seconds": mean * epoch_steps if mean is not None and epoch_steps is not None else None,
        "tokens_per_second": trace.tokens_per_second if trace else None,
        "peak_bytes": trace.peak_bytes if trace else None,
        "memory_bytes": trace.memory_bytes if trace else None,
        "communication_bytes": sum(call.total_bytes for call in trace.collectives)
        if trace and trace.peak_bytes
        else None,
        "predicted_step_seconds": run.estimate.step_seconds,
        "predicted_peak_bytes": run.estimate.peak_bytes,
        "loss": run.loss,
        "max_loss_difference": loss_difference(run, reference),
    }


def findings(runs: Sequence[Run]) -> tuple[str, ...]:
    """What the runs show beyond who won: where optimizer state goes, when gradients live, what sharding costs."""
    measured = [run for run in runs if run.worst is not None and run.worst.memory_bytes is not None]
    return tuple(words for words in (_optimizer(measured), _gradients(measured), _sharding(measured)) if words)


def _optimizer(runs: Sequence[Run]) -> str:
    """Optimizer state by ranks, where ZeRO shards it."""
    sharded = sorted((run for run in runs if run.plan.zero), key=lambda run: run.plan.shard_degree)
    whole = next((run for run in runs if run.plan.world == 1), None)
    shown = [*([whole] if whole else []), *sharded]
    if not sharded or len(shown) < 2:
        return ""
    return f"Optimizer state per rank: {_grouped((format_bytes(_peak(run, 'optimizer_state')), run) for run in shown)}."


def _gradients(runs: Sequence[Run]) -> str:
    """The least that is held of gradients in a step, of the most."""
    shares = []
    for run in runs:
        sizes = [] if run.worst is None else [point.memory_bytes.gradients for point in run.worst.memory_over_time]
        most = max(sizes, default=0)
        if most:
            shares.append((f"{min(sizes) / most:.0%}", run))
    return f"Gradients outside backward, of their most: {_grouped(shares)}." if shares else ""


def _grouped(figures: Iterable[tuple[str, Run]]) -> str:
    """Each figure once, with the runs that have it."""
    groups: dict[str, list[str]] = {}
    for figure, run in figures:
        groups.setdefault(figure, []).append(run.name)
    return "; ".join(f"{figure} ({', '.join(names)})" for figure, names in groups.items())


def _sharding(runs: Sequence[Run]) -> str:
    """Replicas against full sharding on as many ranks."""
    words = []
    timed = [run for run in runs if run.step_seconds]
    for shards in (run for run in timed if run.plan.zero == 3):
        same = (run for run in timed if run.plan.zero == 0 and run.plan.mesh == shards.plan.mesh)
        for replicas in same:
            one, other = statistics.median(replicas.step_seconds), statistics.median(shards.step_seconds)
            faster, slower = (replicas, shards) if one <= other else (shards, replicas)
            words.append(
                f"{faster.name} takes {format_seconds(min(one, other))} per step, {slower.name} {format_seconds(max(one, other))} "
                f"({max(one, other) / min(one, other) - 1:.0%} more)"
            )
    return f"{'; '.join(words)}." if words else ""


def _peak(run: Run, part: str) -> int:
    trace = run.worst
    assert trace is not None
    assert trace.memory_bytes is not None
    return int(msgspec.structs.asdict(trace.memory_bytes)[part])
