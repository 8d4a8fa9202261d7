"""What recording costs: the same training with and without a recorder, in one run.

    python benchmarks/recording.py [--model MODEL] [--samples 2] [--json]

Two pinned ranks. Both programs take turns, one step at a time, until the recorder has watched the given number of steps and
they are paid back. Shown: what a sampled step costs more than a plain one, how many steps lie between two samples, what a step
between samples costs more than one without a recorder, and the amortised cost of it all, from the first sample on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

MODEL = "gpt:layers=4,hidden=256,heads=8,seq=128,vocab=256"
SAMPLES_PER_RANK = 4
MOST_STEPS = 600
PLANS = ((0, "none"), (3, "full"))


def run_rank(payload: dict[str, Any]) -> list[dict[str, Any]]:
    from meshwright.capture.capture import capture_source
    from meshwright.models.source import resolve
    from meshwright.runtime.ranks import joined

    source = resolve(payload["model"])
    graph = capture_source(source)
    with joined("cpu") as rank:
        return [measure(source, graph, zero, recompute, rank, payload["samples"]) for zero, recompute in PLANS]


def measure(source: Any, graph: Any, zero: int, recompute: str, rank: Any, samples: int) -> dict[str, Any]:
    from meshwright.core.request import PlanRequest, plain_plan
    from meshwright.core.result import describe
    from meshwright.measure.record import StepRecorder

    num_samples = SAMPLES_PER_RANK * rank.num_ranks
    request = PlanRequest(zero=zero, recompute=recompute, global_batch=num_samples)  # type: ignore[arg-type]
    plan = plain_plan(request, graph, rank.num_ranks, "")
    batch = source.example(num_samples)
    off, on = build(source, plan, None), build(source, plan, StepRecorder())
    seconds: dict[str, list[float]] = {"off": [], "on": [], "sampled": []}
    seen = 0
    while off.num_steps < MOST_STEPS and not (seen == samples and on.watch.wants(on.num_steps)):
        is_sample = on.watch.wants(on.num_steps)
        seen += is_sample
        one, other = timed(off, batch), timed(on, batch)
        if seen:
            seconds["off"].append(one)
            seconds["sampled" if is_sample else "on"].append(other)
    return {"plan": describe(plan), "num_steps": len(seconds["off"]), **figures(seconds)}


def build(source: Any, plan: Any, recorder: Any) -> Any:
    import torch

    from meshwright.runtime.apply import apply

    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    return apply(source.build(), plan, optimizer=adamw, objective=source.objective, recorder=recorder)


def timed(program: Any, batch: Any) -> float:
    """Wall seconds of a step and all that its recorder does after it; ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    _ = program.step(batch).loss
    return time.perf_counter() - started


def figures(seconds: dict[str, list[float]]) -> dict[str, float]:
    plain = statistics.median(seconds["off"])
    return {
        "plain_seconds": plain,
        "sample_seconds": statistics.fmean(seconds["sampled"]) - plain,
        "steps_between": len(seconds["off"]) / len(seconds["sampled"]),
        "between_share": statistics.median(seconds["on"]) / plain - 1,
        "amortised_share": (sum(seconds["on"]) + sum(seconds["sampled"])) / sum(seconds["off"]) - 1,
        "cost_share": (statistics.fmean(seconds["sampled"]) - plain)
        * len(seconds["sampled"])
        / (plain * len(seconds["off"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    from meshwright.runtime.launch import launch

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    rows = launch("recording:run_rank", vars(options), 2)
    for row in rows:
        print(
            f"{row['plan']}, {row['num_steps']} steps: plain step {1e3 * row['plain_seconds']:.0f} ms; a sampled one "
            f"{1e3 * row['sample_seconds']:+.0f} ms, every {row['steps_between']:.0f} steps: {row['cost_share']:.1%}; "
            f"steps between {row['between_share']:+.1%}; in all {row['amortised_share']:+.1%}"
        )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
