"""A run in three sentences: what it did, how that compares with the promise, and where its time goes."""

from __future__ import annotations

import statistics

import msgspec

from meshwright.core.estimate import TimeParts
from meshwright.core.result import describe
from meshwright.core.run.trace import Trace
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.run import Run, median, speed_words
from meshwright.report.straggler import find_straggler
from meshwright.report.words import TIME_WORDS

WORK = ("forward", "recompute", "backward", "update")
PROMISED_TIME, PROMISED_MEMORY = 0.10, 0.05
"""How far a measured figure may lie from the predicted one, as the design promises."""


def verdict(run: Run) -> tuple[str, str, str]:
    trace = run.worst
    if run.goes_on:
        return _going(run, trace)
    if trace is None:
        return _planned(run)
    return _did(run, trace), _promised(run, trace), _time_words(trace.time_seconds, run, trace)


def _planned(run: Run) -> tuple[str, str, str]:
    estimate = run.estimate
    fits = (
        "fits" if estimate.fits else f"does not fit, by {format_bytes(estimate.needed_bytes - estimate.budget_bytes)}"
    )
    moment = f"; fullest is rank {estimate.worst_rank} in {estimate.worst_moment}" if estimate.worst_moment else ""
    return (
        f"Predicted, nothing has run: {describe(run.plan)} takes {format_seconds(estimate.step_seconds)} per step, "
        f"{speed_words(estimate.tokens_per_second)} {run.unit}/s, {estimate.model_flops_utilisation:.1%} of the devices' peak"
        + (f" ({estimate.origin_words})." if estimate.rates else "."),
        f"It needs {format_bytes(estimate.needed_bytes)} of {format_bytes(estimate.budget_bytes)} per device and {fits}{moment}.",
        _time_words(estimate.time_seconds, run, None),
    )


def _going(run: Run, trace: Trace | None) -> tuple[str, str, str]:
    """Of a run that goes on. trace: of its last sampled step."""
    done, seconds = 1 + max(line["step"] for line in run.metrics), statistics.median(run.step_seconds)
    promise = run.estimate.step_seconds
    slower = _off(seconds / promise - 1, "slower", "faster", PROMISED_TIME)
    memory = f"; {_memory_words(run, trace.peak_bytes, trace.rank)}" if trace and trace.peak_bytes else ""
    loss = f"; the loss is {run.loss:.4f}" if run.loss is not None else ""
    return (
        f"{describe(run.plan)} goes on: {done:,} steps are done, {format_seconds(seconds)} each by the median{loss}.",
        f"It was promised {format_seconds(promise)} per step: {slower}{memory}.",
        _time_words(trace.time_seconds, run, trace)
        if trace
        else "Memory and the timeline of the step follow when a step was sampled.",
    )


def _did(run: Run, trace: Trace) -> str:
    loss = f"; the loss is {run.loss:.4f}" if run.loss is not None else ""
    times = f" {1 + len(run.repeats)} times" if run.repeats else ""
    seconds = _step_seconds(run, trace)
    speed = trace.tokens_per_second * trace.step_seconds / seconds if seconds else 0.0
    return (
        f"{describe(run.plan)} ran {trace.num_steps:,} steps{times}, {format_seconds(seconds)} each by the median, "
        f"{speed_words(speed)} {run.unit}/s{loss}."
    )


def _step_seconds(run: Run, trace: Trace) -> float:
    """By the median, over all repeats where there are some."""
    return (median(run.step_seconds) if run.repeats else None) or trace.step_seconds


def _promised(run: Run, trace: Trace) -> str:
    estimate = run.estimate
    slower = _step_seconds(run, trace) / estimate.step_seconds - 1 if estimate.step_seconds else 0.0
    words = f"It was promised {format_seconds(estimate.step_seconds)} per step: {_off(slower, 'slower', 'faster', PROMISED_TIME)}"
    if trace.peak_bytes is None:
        return words + "; no step was sampled, so its memory is not known."
    return f"{words}; {_memory_words(run, trace.peak_bytes, trace.rank)}."


def _memory_words(run: Run, peak_bytes: int, rank: int) -> str:
    promised = run.estimate.peak_bytes
    more = peak_bytes / promised - 1
    return (
        f"memory peaked at {format_bytes(peak_bytes)} on rank {rank}, where {format_bytes(promised)} were predicted: "
        f"{_off(more, 'more', 'less', PROMISED_MEMORY)}"
    )


def _off(error: float, more: str, less: str, band: float) -> str:
    if abs(error) < 0.005:
        return "as promised"
    kept = "within" if abs(error) <= band else "outside"
    return f"{abs(error):.0%} {more if error > 0 else less}, {kept} the promised {band:.0%}"


def _time_words(parts: TimeParts, run: Run, trace: Trace | None) -> str:
    """The largest part of the step, what it waits, and who is slow."""
    sizes = msgspec.structs.asdict(parts)
    total = parts.total or 1.0
    largest = max(sizes, key=lambda name: sizes[name])
    idle = {name: size for name, size in sizes.items() if name not in WORK and name != "other" and size > 0}
    words = f"Most of the step is {TIME_WORDS[largest]} ({sizes[largest] / total:.0%})"
    if idle:
        worst = max(idle, key=lambda name: idle[name])
        waits = sum(idle.values()) / total
        words += f"; {waits:.0%} is not work, most of that {TIME_WORDS[worst]}"
    else:
        words += "; no time is lost to waiting"
    slow = find_straggler(run.plan, run.traces) if trace is not None else None
    return f"{words}; {slow}." if slow else f"{words}."
