"""Contestants that take turns: a few steps at a time, in an order that rotates, so that noise of the machine hits all alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WARMUP_STEPS = 3
STEPS_PER_TURN = 3

Step = Callable[[], Any]
Seconds = dict[str, list[float]]


def take_turns(steps: Mapping[str, Step], rounds: int) -> Seconds:
    """Every contestant's seconds per turn, on this rank."""
    import torch.distributed as dist

    seconds: Seconds = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    names = list(steps)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS_PER_TURN):
                steps[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(seconds: Seconds, theirs: str, ours: str) -> float:
    """Our steps per second over theirs: the ratio of the medians."""
    return statistics.median(seconds[theirs]) / statistics.median(seconds[ours])


def row(seconds: Seconds, theirs: str, ours: str) -> str:
    """One line: both steps, the ratio, and the quartiles of the rounds' own ratios, which show the noise."""
    each = [one / other for one, other in zip(seconds[theirs], seconds[ours], strict=True)]
    low, _, high = statistics.quantiles(each, n=4)
    one, other = (1e3 * statistics.median(seconds[name]) / STEPS_PER_TURN for name in (theirs, ours))
    words = f"{ours} / {theirs}"
    return f"{words:46.46} {one:9.1f} ms {other:9.1f} ms {ratio(seconds, theirs, ours):13.3f} ({low:.3f} to {high:.3f})"


HEADER = f"{'':46} {'their step':>12} {'our step':>12} {'steps/s against theirs':>24}"


def add_to_path() -> None:
    """Ranks are new processes: they must find the files of this folder too."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
