"""Predicted against measured, line by line; terminal and page show the same lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.estimate import Estimate, TimeParts
from meshwright.core.run.trace import Trace
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.run import speed_words
from meshwright.report.words import MEMORY_WORDS

MANY_TIMES = 11
"""From here on a percentage says less than a factor."""


@dataclass(frozen=True)
class Line:
    """One figure, predicted and measured. Lines that begin with two spaces are part of the line above."""

    words: str
    predicted: float
    measured: float | None
    """None where no step was sampled."""
    show: Callable[[float], str]
    is_total: bool = False

    @property
    def cells(self) -> tuple[str, str, str, str]:
        if self.measured is None:
            return self.words, self.show(self.predicted), "not sampled", ""
        return self.words, self.show(self.predicted), self.show(self.measured), self._error

    @property
    def _error(self) -> str:
        """In percent; many times too much is said as that."""
        if not self.measured:
            return ""
        times = self.predicted / self.measured
        return f"{times - 1:+.1%}" if times < MANY_TIMES else f"{times:,.0f} times"


def comparison_sections(estimate: Estimate, trace: Trace, unit: str = "tokens") -> tuple[tuple[Line, ...], ...]:
    """Step time and its parts, memory by category, collectives. unit: what the speed counts."""
    memory = _memory(estimate, trace)
    return _time(estimate, trace, unit), memory, _collectives(estimate, trace) if trace.memory_bytes is not None else ()


def _time(estimate: Estimate, trace: Trace, unit: str) -> tuple[Line, ...]:
    parts = (
        Line(f"  {words}", predicted, measured, format_seconds)
        for words, predicted, measured in _time_parts(estimate.time_seconds, trace.time_seconds)
        if predicted or measured
    )
    return (
        Line("step", estimate.step_seconds, trace.step_seconds, format_seconds, is_total=True),
        *parts,
        Line(f"{unit} per second", estimate.tokens_per_second, trace.tokens_per_second, speed_words),
    )


def _memory(estimate: Estimate, trace: Trace) -> tuple[Line, ...]:
    total = Line(
        "peak memory per device", estimate.peak_bytes, trace.peak_bytes, format_bytes, trace.peak_bytes is not None
    )
    if trace.memory_bytes is None:
        return (total,)
    sizes = (
        (words, getattr(estimate.memory_bytes, part), getattr(trace.memory_bytes, part))
        for part, words in MEMORY_WORDS.items()
    )
    return (total, *(Line(f"  {words}", one, other, format_bytes) for words, one, other in sizes if one or other))


def _time_parts(one: TimeParts, other: TimeParts) -> list[tuple[str, float, float]]:
    """What a step consists of; lines that begin with two dots are part of the line above."""
    return [
        ("forward, with its communication", one.forward_total, other.forward_total),
        (".. waiting for communication", one.exposed_gather, other.exposed_gather),
        ("backward, with its communication", one.backward_total, other.backward_total),
        (".. recompute", one.recompute, other.recompute),
        (".. waiting for communication", one.exposed_reduce, other.exposed_reduce),
        ("communication inside blocks", one.exposed_inner, other.exposed_inner),
        ("bubble: idle until another stage is ready", one.bubble, other.bubble),
        ("transfer", one.transfer, other.transfer),
        ("update", one.update, other.update),
        ("other", one.other, other.other),
    ]


def _collectives(estimate: Estimate, trace: Trace) -> tuple[Line, ...]:
    predicted = {(call.kind, call.axis): call.total_bytes for call in estimate.collectives}
    measured = {(call.kind, call.axis): call.total_bytes for call in trace.collectives}
    return tuple(
        Line(
            f"{kind.replace('_', '-')} along {axis}, bytes per step",
            predicted.get((kind, axis), 0),
            measured.get((kind, axis), 0),
            format_bytes,
        )
        for kind, axis in dict.fromkeys([*predicted, *measured])
    )
