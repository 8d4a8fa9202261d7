"""What recording costs: the same training with and without a recorder, in one run.

    python benchmarks/recording.py [--model MODEL] [--samples 2] [--most-steps 4000] [--json]

Two pinned ranks. Both programs take turns, one step at a time and who goes first in turn too, until the recorder has watched the
given number of steps and they are paid back. Shown:

    a sampled step    what it costs more than a plain one, and how many steps lie between two of them
    steps between     what one costs more than a step of the program without a recorder
    in all            all seconds with a recorder against all without, from the first sample to the step before the one after
                      the last: whole strides, so that what a sample costs is spread as in a long run
    off               without a recorder what is left are the places that would name a region: so many, timed by themselves
                      many thousand times, against the step

Where --most-steps cuts a stride off, `in all` counts too much, and says so.
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
MOST_STEPS = 4000
REGION_CALLS = 200_000
PLANS = ((0, "none"), (3, "full"))


def run_rank(payload: dict[str, Any]) -> list[dict[str, Any]]:
    from meshwright.capturing.capture import capture_source
    from meshwright.models.source import resolve
    from meshwright.runtime.ranks import joined

    source = resolve(payload["model"])
    graph = capture_source(source)
    with joined("cpu") as rank:
        return [measure(source, graph, plan, rank, payload) for plan in PLANS]


def measure(source: Any, graph: Any, kind: tuple[int, str], rank: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from meshwright.core.request import PlanRequest
    from meshwright.core.result import describe
    from meshwright.measure.record import StepRecorder
    from meshwright.rules.plain_plan import plain_plan

    zero, recompute = kind
    samples, most_steps = payload["samples"], payload["most_steps"]
    num_samples = SAMPLES_PER_RANK * rank.num_ranks
    request = PlanRequest(zero=zero, recompute=recompute, global_batch=num_samples)  # type: ignore[arg-type]
    plan = plain_plan(request, graph, rank.num_ranks, "")
    batch = source.example(num_samples)
    off, on = build(source, plan, None), build(source, plan, StepRecorder())
    seconds: dict[str, list[float]] = {"off": [], "on": [], "sampled": []}
    seen = 0
    while off.num_steps < most_steps and not (seen == samples and on.watch.wants(on.num_steps)):
        is_sample = on.watch.wants(on.num_steps)
        seen += is_sample
        one, other = in_turn(off, on, batch)
        if seen:
            seconds["off"].append(one)
            seconds["sampled" if is_sample else "on"].append(other)
    is_whole = seen == samples and on.watch.wants(on.num_steps)
    found = {"plan": describe(plan), "num_steps": len(seconds["off"]), "whole_strides": is_whole, **figures(seconds)}
    return {**found, "off_share": off_seconds(off, batch) / found["plain_seconds"]}


def in_turn(off: Any, on: Any, batch: Any) -> tuple[float, float]:
    """A step of each; who goes first changes with every step, so that neither always finds the caches of the other."""
    if off.num_steps % 2:
        one, other = timed(off, batch), timed(on, batch)
    else:
        other, one = timed(on, batch), timed(off, batch)
    return one, other


def off_seconds(program: Any, batch: Any) -> float:
    """What a step without a recorder spends on asking whether somebody listens."""
    region, num_regions = program.watch.region, 0

    def counted(name: str) -> Any:
        nonlocal num_regions
        num_regions += 1
        return region(name)

    program.watch.region = counted
    _ = program.step(batch).loss
    program.watch.region = region
    started = time.perf_counter()
    for _ in range(REGION_CALLS):
        with region("forward"):
            pass
    return num_regions * (time.perf_counter() - started) / REGION_CALLS


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
    parser.add_argument("--most-steps", type=int, default=MOST_STEPS)
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
            f"{'' if row['whole_strides'] else ' (cut off by --most-steps: too much)'}; off {row['off_share']:.4%}"
        )
    if options.json:
        print(json.dumps({"plans": rows}))


if __name__ == "__main__":
    main()
