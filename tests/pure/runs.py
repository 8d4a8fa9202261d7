"""Runs written down by hand, of any size, for the tests of the report. No torch."""

from __future__ import annotations

from typing import Any

from machines import chain_graph, named_machine, plan_for

from meshwright.core.collective import Collective
from meshwright.core.estimate import MemoryParts, TimeParts
from meshwright.core.plan import Plan
from meshwright.core.run.trace import Interval, MemoryPoint, Part, PartSeconds, StepRecord, Trace
from meshwright.cost.estimate import estimate
from meshwright.cost.forecast import forecast
from meshwright.report.run import Run

PARTS: tuple[Part, ...] = ("forward", "backward", "waiting", "update")


def trace_of(
    plan: Plan, rank: int, num_steps: int = 20, slow: float = 1.0, num_bars: int = 8, num_calls: int = 1
) -> Trace:
    """A rank that takes `slow` times as long over its work as others; its step has `num_bars` bars of compute."""
    bars = [PARTS[number % 4] for number in range(num_bars)]
    width = 0.08 / num_bars
    timeline = [
        Interval(
            stream="compute",
            part=part,
            start_seconds=number * width,
            seconds=width * (slow if part != "waiting" else 1.0),
        )
        for number, part in enumerate(bars)
    ]
    each = 0.03 / num_calls
    timeline += [
        Interval(
            stream="communication", part="all_reduce", start_seconds=0.02 + 2 * number * each, seconds=each, axis="dp",
            num_bytes=4096,
        )
        for number in range(num_calls)
    ]  # fmt: skip
    sums = [
        PartSeconds(
            stream="compute", part=part, count=bars.count(part),
            seconds=sum(one.seconds for one in timeline if one.part == part),
        )
        for part in PARTS
    ]  # fmt: skip
    points = tuple(
        MemoryPoint(
            at_seconds=0.0001 * number,
            memory_bytes=MemoryParts(parameters=4000 + rank, optimizer_state=8000, activations=100 * (number % 97)),
        )
        for number in range(400)
    )
    peak = max(points, key=lambda point: point.memory_bytes.total).memory_bytes
    return Trace(
        plan=plan.hash, rank=rank, num_ranks=plan.world, step_seconds=0.1,
        time_seconds=TimeParts(forward=0.03, backward=0.05, exposed_reduce=0.015, update=0.005),
        peak_bytes=peak.total, memory_bytes=peak, host_bytes=1 << 28, tokens_per_second=1000.0,
        collectives=(Collective(kind="all_reduce", axis="dp", count=1, total_bytes=4096),),
        timeline=tuple(timeline), part_seconds=tuple(sums), memory_over_time=points, sampled_at=1000.0 + 0.001 * rank,
        num_steps=num_steps,
        steps=tuple(
            StepRecord(
                step=step, loss=5.0 / (1 + step), seconds=0.1 + 0.0001 * ((step * 7919) % 101), tokens=100, sampled=step == 2,
                time_seconds=TimeParts(forward=0.04, backward=0.05, update=0.01),
            )
            for step in range(num_steps)
        ),
        environment=(("torch", "2.13.0"), ("device", "a test's")),
    )  # fmt: skip


def run_of(
    name: str = "run", num_steps: int = 20, num_bars: int = 8, devices: int = 8, num_calls: int = 1, **request: Any
) -> Run:
    """A run of a plan on hosts of 8 devices, with a trace of every rank."""
    graph = chain_graph(8)
    plan = plan_for(graph, **({"dp": 2, "microbatch": 1, "global_batch": 8} | request))
    cluster = named_machine(devices, max(1, plan.world // devices))
    return Run(
        name=name,
        plan=plan,
        estimate=estimate(graph, plan, cluster),
        cluster=cluster,
        forecast=forecast(graph, plan, cluster),
        traces=tuple(
            trace_of(plan, rank, num_steps, num_bars=num_bars, num_calls=num_calls) for rank in range(plan.world)
        ),
        metrics=tuple(
            {
                "step": step,
                "loss": 5.0 / (1 + step),
                "learning_rate": 1e-3 / (1 + step),
                "tokens_per_second": 1000.0 + step,
            }
            for step in range(num_steps)
        ),
        settings='name = "demo"\n',
    )
