"""What the pictures of a page are drawn from: a Run → plain lists, as short as the eye can tell.

memory     at most MOST_CURVES curves in full; a rank beside them shares what its coordinate does
timeline   neighbours of one part closer than a 2,000th of the step are one bar
steps      seconds, loss and learning rate with six digits
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.core.estimate import MemoryParts
from meshwright.core.names import compact_names
from meshwright.core.run.trace import Forecast, MemoryPoint, Trace
from meshwright.report.bars import measured_rows, planned_rows, short
from meshwright.report.overlap import overlap
from meshwright.report.run import Run, median
from meshwright.report.straggler import busy_seconds, sampled_seconds
from meshwright.report.words import MEMORY_WORDS, TIME_WORDS
from meshwright.rules.downsampling import downsampled

MANY_RANKS = 16
FEW_POINTS = 160
"""Of a memory curve, where there are many ranks."""
MOST_LINE_POINTS = 2000
LEAST_SHOWN = 1e-6
"""Seconds: a shorter part of a step is left out of its picture."""


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    return {"memory_words": MEMORY_WORDS, "runs": [_run(run) for run in runs]}


def _run(run: Run) -> dict[str, Any]:
    trace = run.worst
    memory = trace.memory_bytes if trace and trace.memory_bytes else run.estimate.memory_bytes
    return {
        "name": run.name,
        "budget_bytes": run.estimate.budget_bytes,
        "picture": _picture(run),
        "gantt": [*planned_rows(run), *measured_rows(run)],
        "memory": _curves(run),
        "predicted_memory": _predicted_totals(run.forecast),
        "peak": msgspec.structs.asdict(memory),
        "time": _time(run),
        "histogram": {
            "name": run.name,
            "values": [short(seconds) for seconds in run.step_seconds],
            "median": median(run.step_seconds),
            "predicted": run.estimate.step_seconds,
        },
        "communication": _communication(run),
        "overlap": overlap(trace) if trace else [],
        "ranks": _ranks(run),
        "loss": [
            {**_metric(run, "loss"), "name": "training loss"},
            {**_metric(run, "validation_loss"), "name": "validation loss"},
        ],
        "rate": [{**_metric(run, "learning_rate"), "name": "learning rate"}],
        "speed": [{**_metric(run, "tokens_per_second"), "name": f"{run.unit} per second"}],
    }


# Where everything lies


def _picture(run: Run) -> dict[str, Any]:
    plan, cluster = run.plan, run.cluster
    return {
        "mesh": msgspec.structs.asdict(plan.mesh),
        "world": plan.world,
        "devices_per_host": cluster.devices_per_host if cluster else plan.world,
        "device": cluster.device.name if cluster else "a device",
        "holds": [_holds(run, coordinate) for coordinate in range(plan.mesh.pp)],
        "shares": _shares(run),
    }


def _holds(run: Run, coordinate: int) -> str:
    lines = []
    for number, stage in enumerate(run.plan.stages):
        if stage.coordinate == coordinate:
            named = ", ".join(compact_names([name for name in run.plan.blocks_by_stage[number] if name]))
            lines.append(f"stage {number}: {named or 'all that is in no block'}")
    return "\n".join(lines)


def _shares(run: Run) -> str:
    """What part of the tensors of its blocks a device holds."""
    plan = run.plan
    lines = [f"1/{plan.mesh.tp} of the tensors split over tp"] if plan.mesh.tp > 1 else []
    if plan.mesh.cp > 1:
        lines.append(f"1/{plan.mesh.cp} of each sequence")
    if plan.mesh.ep > 1:
        lines.append(f"1/{plan.mesh.ep} of the experts")
    sharded = {1: "optimizer state", 2: "optimizer state and gradients", 3: "parameters, gradients and optimizer state"}
    if plan.zero:
        lines.append(f"1/{plan.shard_degree} of {sharded[plan.zero]} (ZeRO {plan.zero})")
    return "\n".join(lines) or "whole parameters, gradients and optimizer state"


# Memory


def _curves(run: Run) -> list[dict[str, Any]]:
    """Of every rank that was sampled; before a run, of every pp coordinate as predicted."""
    sampled = [trace for trace in run.traces if trace.memory_over_time]
    worst = run.worst
    points = FEW_POINTS if len(sampled) > MANY_RANKS else None
    if sampled:
        return [
            {
                "name": f"rank {trace.rank}",
                "worst": worst is not None and trace.rank == worst.rank,
                "measured": True,
                "coordinate": trace.rank * run.plan.mesh.pp // run.plan.world,
                **_curve(trace.memory_over_time, sampled_seconds(trace), points),
            }
            for trace in sampled
        ]
    if run.forecast is None:
        return []
    worst_coordinate = run.estimate.worst_rank * run.plan.mesh.pp // run.plan.world
    return [
        {
            "name": f"predicted, pp {coordinate}" if run.plan.mesh.pp > 1 else "predicted",
            "worst": coordinate == worst_coordinate,
            "measured": False,
            "coordinate": coordinate,
            **_curve(curve, run.forecast.step_seconds, None),
        }
        for coordinate, curve in enumerate(run.forecast.memory_over_time)
    ]


def _curve(curve: Sequence[MemoryPoint], end: float, most: int | None) -> dict[str, Any]:
    thin = downsampled(curve, most) if most else curve
    return {
        "end": max(end, thin[-1].at_seconds),
        "at": [short(point.at_seconds) for point in thin],
        "parts": {
            name: [getattr(point.memory_bytes, name) for point in thin] for name in MemoryParts.__struct_fields__
        },
    }


def _predicted_totals(forecast: Forecast | None) -> list[dict[str, Any]]:
    if forecast is None:
        return []
    return [
        {
            "end": forecast.step_seconds,
            "at": [short(point.at_seconds) for point in curve],
            "total": [point.memory_bytes.total for point in curve],
        }
        for curve in forecast.memory_over_time
    ]


# Sums


def _time(run: Run) -> list[dict[str, Any]]:
    predicted = msgspec.structs.asdict(run.estimate.time_seconds)
    trace = run.worst
    measured = msgspec.structs.asdict(trace.time_seconds) if trace else {}
    return [
        {"name": words, "predicted": predicted[part], "measured": measured.get(part)}
        for part, words in TIME_WORDS.items()
        if max(predicted[part], measured.get(part) or 0.0) >= LEAST_SHOWN
    ]


def _communication(run: Run) -> list[dict[str, Any]]:
    trace = run.worst
    predicted = {(call.kind, call.axis): call for call in run.estimate.collectives}
    measured = {(call.kind, call.axis): call for call in trace.collectives} if trace else {}
    rows = []
    for kind, axis in dict.fromkeys([*predicted, *measured]):
        one, other = predicted.get((kind, axis)), measured.get((kind, axis))
        count = other or one
        rows.append(
            {
                "name": f"{axis}: {kind.replace('_', '-')}",
                "predicted": one.total_bytes if one else 0,
                "measured": (other.total_bytes if other else 0) if trace and trace.collectives else None,
                "more": f"{count.count if count else 0} calls per step and rank",
            }
        )
    return sorted(rows, key=lambda row: str(row["name"]))


def _ranks(run: Run) -> list[dict[str, Any]]:
    return [
        {"name": f"rank {trace.rank}", "predicted": None, "measured": busy_seconds(trace), "more": _waits(trace)}
        for trace in run.traces
        if trace.part_seconds and len(run.traces) > 1
    ]


def _waits(trace: Trace) -> str:
    waited = sum(part.seconds for part in trace.part_seconds if part.part == "waiting")
    return f"waits {waited / (sampled_seconds(trace) or 1.0):.1%} of the sampled step"


def _metric(run: Run, name: str) -> dict[str, Any]:
    lines = [line for line in run.metrics if name in line and math.isfinite(line[name])]
    every = max(1, -(-len(lines) // MOST_LINE_POINTS))
    lines = [*lines[::every], *(lines[-1:] if lines and (len(lines) - 1) % every else [])]
    return {"steps": [line["step"] for line in lines], "values": [short(line[name]) for line in lines]}
