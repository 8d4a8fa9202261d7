"""Predicted against measured on this machine: every data-parallel plan of one model, two ranks, in one run.

    python benchmarks/accuracy.py [--model MODEL] [--precision fp32] [--steps 10] [--json]

The ranks probe the machine, then run each plan; the table is Markdown, for docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

MODEL = "gpt:layers=4,hidden=256,heads=8,seq=256,vocab=256"
SAMPLES_PER_RANK = 8


def run_rank(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a plan; rank 0's rows come back."""
    from meshwright.capture.capture import capture_source
    from meshwright.core.request import PlanRequest, plain_plan
    from meshwright.core.result import describe
    from meshwright.measure.probe import measure_cluster
    from meshwright.models.source import resolve
    from meshwright.runtime.ranks import joined

    source = resolve(payload["model"])
    graph = capture_source(source, payload["precision"])
    rows = []
    with joined("cpu") as rank:
        cluster = measure_cluster(rank)
        for zero in (0, 1, 2, 3):
            for microbatch in (SAMPLES_PER_RANK, SAMPLES_PER_RANK // 2):
                for recompute in ("none", "full"):
                    request = PlanRequest(
                        zero=zero,  # type: ignore[arg-type]
                        global_batch=SAMPLES_PER_RANK * rank.num_ranks,
                        microbatch=microbatch,
                        recompute=recompute,
                    )
                    plan = plain_plan(request, graph, rank.num_ranks, cluster.hash)
                    rows.append({"plan": describe(plan), **measure(source, graph, plan, cluster, payload["steps"])})
    return rows


def measure(source: Any, graph: Any, plan: Any, cluster: Any, steps: int) -> dict[str, Any]:
    import torch

    from meshwright.core.recipe import Recipe
    from meshwright.cost.estimate import estimate
    from meshwright.measure.record import StepRecorder
    from meshwright.runtime.apply import apply

    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    program = apply(
        source.build(), plan, optimizer=adamw, objective=source.objective, max_norm=1.0, recorder=StepRecorder()
    )
    batch = source.example(plan.global_batch)
    for _ in range(steps):
        program.step(batch)
    trace, predicted = program.trace(), estimate(graph, plan, cluster, Recipe(clips=True))
    return {
        "predicted_seconds": predicted.step_seconds,
        "measured_seconds": trace.step_seconds,
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": trace.peak_bytes,
        "collectives_equal": predicted.collectives == trace.collectives,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=10)
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
        "time_median_error": statistics.median(map(abs, time_errors)),
        "memory_median_error": statistics.median(map(abs, memory_errors)),
        "collectives_equal": all(row["collectives_equal"] for row in rows),
    }
    print(f"\nmedian error: time {summary['time_median_error']:.1%}, memory {summary['memory_median_error']:.1%}")
    if options.json:
        print(json.dumps({**summary, "rows": rows}))


if __name__ == "__main__":
    main()
