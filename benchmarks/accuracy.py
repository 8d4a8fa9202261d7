"""Predicted against measured on this machine: every data-parallel plan of one model, two ranks, in one run.

    python benchmarks/accuracy.py [--model MODEL] [--precision fp32] [--rounds 8] [--json]

The ranks probe the machine before and after; of each figure the faster counts. All plans take turns in between, one step at
a time. A plan's time is the median of the faster half of its steps, as in the probe: the slower half is what other programs
did to both. The table is Markdown, for docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

MODEL = "gpt:layers=4,hidden=256,heads=8,seq=256,vocab=256"
SAMPLES_PER_RANK = 8
SAMPLED_STEP = 2


def run_rank(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a plan; rank 0's rows come back."""
    from meshwright.capturing.capture import capture_source
    from meshwright.core.recipe import Recipe
    from meshwright.core.result import describe
    from meshwright.cost.estimate import estimate
    from meshwright.measure.probe import measure_cluster
    from meshwright.models.source import resolve
    from meshwright.runtime.ranks import joined

    source = resolve(payload["model"])
    graph = capture_source(source, payload["precision"])
    with joined("cpu") as rank:
        cluster = measure_cluster(rank)
        programs = [build(source, plan) for plan in plans(graph, rank.num_ranks, payload["precision"])]
        batch = source.example(SAMPLES_PER_RANK * rank.num_ranks)
        seconds = take_turns(programs, batch, payload["rounds"])
        cluster = faster(cluster, measure_cluster(rank))
        rows = []
        for program, each in zip(programs, seconds, strict=True):
            trace, predicted = program.trace(), estimate(graph, program.plan, cluster, Recipe(clips=True))
            rows.append(
                {
                    "plan": describe(program.plan),
                    "predicted_seconds": predicted.step_seconds,
                    "measured_seconds": statistics.median(sorted(each)[: (len(each) + 1) // 2]),
                    "predicted_bytes": predicted.peak_bytes,
                    "measured_bytes": trace.peak_bytes,
                    "collectives_equal": predicted.collectives == trace.collectives,
                    "predicted_parts": msgspec.to_builtins(predicted.time_seconds),
                    "measured_parts": msgspec.to_builtins(trace.time_seconds),
                }
            )
        return rows


def plans(graph: Any, num_ranks: int, precision: Any) -> list[Any]:
    from meshwright.core.request import PlanRequest
    from meshwright.rules.plain_plan import plain_plan

    requests = [
        PlanRequest(
            zero=zero,  # type: ignore[arg-type]
            global_batch=SAMPLES_PER_RANK * num_ranks,
            microbatch=microbatch,
            recompute=recompute,
            precision=precision,
        )
        for zero in (0, 1, 2, 3)
        for microbatch in (SAMPLES_PER_RANK, SAMPLES_PER_RANK // 2)
        for recompute in ("none", "full")
    ]
    return [plain_plan(request, graph, num_ranks, "") for request in requests]


def build(source: Any, plan: Any) -> Any:
    import torch

    from meshwright.measure.record import StepRecorder
    from meshwright.runtime.apply import apply

    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    return apply(
        source.build(), plan, optimizer=adamw, objective=source.objective, max_norm=1.0, recorder=StepRecorder()
    )


def take_turns(programs: list[Any], batch: Any, rounds: int) -> list[list[float]]:
    """Seconds of the plain steps of each program, after one that a recorder saw."""
    for program in programs:
        for _ in range(SAMPLED_STEP + 1):
            program.step(batch)
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for program, each in zip(programs, seconds, strict=True):
            output = program.step(batch)
            if not output.sampled:
                each.append(output.seconds)
    return seconds


def faster(one: Any, other: Any) -> Any:
    """The better of each figure of two probes."""
    pairs = zip(one.device.rates, other.device.rates, strict=True)
    device = msgspec.structs.replace(
        one.device,
        rates=tuple(max(pair, key=lambda rate: rate.per_second) for pair in pairs),
        launch_seconds=min(one.device.launch_seconds, other.device.launch_seconds),
        backward_launch_seconds=min(one.device.backward_launch_seconds, other.device.backward_launch_seconds),
        split_launch_seconds=min(one.device.split_launch_seconds, other.device.split_launch_seconds),
        halves_launch_seconds=min(one.device.halves_launch_seconds, other.device.halves_launch_seconds),
        update_elements_per_second=max(one.device.update_elements_per_second, other.device.update_elements_per_second),
        overlap_share=max(one.device.overlap_share, other.device.overlap_share),
        shard_call_seconds=min(one.device.shard_call_seconds, other.device.shard_call_seconds),
    )
    collectives = zip(one.collectives, other.collectives, strict=True)
    return msgspec.structs.replace(
        one, device=device, collectives=tuple(min(pair, key=lambda point: point.seconds) for pair in collectives)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    from meshwright.core.units import format_bytes, format_seconds
    from meshwright.runtime.launch import launch

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    rows = launch("accuracy:run_rank", vars(options), 2)
    print("| plan | step, predicted | measured | error | peak, predicted | measured | error | collectives |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    time_errors, memory_errors = [], []
    for row in rows:
        time_errors.append(row["predicted_seconds"] / row["measured_seconds"] - 1)
        memory_errors.append(row["predicted_bytes"] / row["measured_bytes"] - 1)
        equal = "equal" if row["collectives_equal"] else "differ"
        print(
            f"| {row['plan']} | {format_seconds(row['predicted_seconds'])} | {format_seconds(row['measured_seconds'])} "
            f"| {time_errors[-1]:+.1%} | {format_bytes(row['predicted_bytes'])} | {format_bytes(row['measured_bytes'])} "
            f"| {memory_errors[-1]:+.1%} | {equal} |"
        )
    summary = {
        "time_worst_error": max(map(abs, time_errors)),
        "time_median_error": statistics.median(map(abs, time_errors)),
        "memory_median_error": statistics.median(map(abs, memory_errors)),
        "collectives_equal": all(row["collectives_equal"] for row in rows),
    }
    print(
        f"\nmedian error: time {summary['time_median_error']:.1%} (worst {summary['time_worst_error']:.1%}), "
        f"memory {summary['memory_median_error']:.1%}"
    )
    if options.json:
        print(json.dumps({**summary, "rows": rows}))


if __name__ == "__main__":
    main()
