"""What differs between two plans, part by part, and what it costs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from rich.table import Table
from rich.text import Text

from meshwright.core.axes import AXES, MODEL_AXES, Axis
from meshwright.core.codec import Value
from meshwright.core.estimate import Estimate
from meshwright.core.pipeline.kinds import kind_of
from meshwright.core.plan import Plan, TensorSharding
from meshwright.core.result import offload_in_short
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.plan_words import CONTEXT_WORDS, offload_words, recompute_words, stage_counts
from meshwright.report.words import MEMORY_WORDS, TIME_WORDS

LEAST_SHOWN = 0.001
"""Parts of a step or of memory that change by less than this share of the whole are left out."""


class Difference(Value, kw_only=True):
    """One part in which two plans differ, in words."""

    part: str
    first: str
    second: str


class Change(Value, kw_only=True):
    """One figure of two estimates."""

    figure: str
    first: float
    second: float


def plan_differences(first: Plan, second: Plan) -> tuple[Difference, ...]:
    """The parts that differ, in the order a plan has them."""
    found = []
    for part, words in _PARTS.items():
        one, other = words(first), words(second)
        if one != other:
            found.append(Difference(part=part, first=one, second=other))
    found += _split_otherwise(first, second)
    return tuple(found)


def difference_words(plan: Plan, than: Plan) -> str:
    """How a plan differs from another, in a few words: `tp 4 · pp 8 · microbatch 1`. What follows from these is left out."""
    differing = {difference.part for difference in plan_differences(than, plan)}
    parts = [f"{axis} {plan.mesh.degrees[axis]}" for axis in reversed(MODEL_AXES) if axis in differing]
    if "dp" in differing and (not parts or plan.world != than.world):
        parts.append(f"dp {plan.mesh.dp}")
    if "stages" in differing and not {"pp", "stages a rank"} & differing:
        parts.append("other stages")
    parts += [words(plan) for part, words in _SHORT.items() if part in differing]
    return " · ".join(parts) or ("other shardings" if differing else "the same plan")


def estimate_changes(first: Estimate, second: Estimate) -> tuple[Change, ...]:
    """Step, speed and memory, and the parts of both that changed."""
    figures = ["step_seconds", "tokens_per_second", "model_flops_utilisation", "bubble", "peak_bytes", "host_bytes"]
    found = [Change(figure=name, first=getattr(first, name), second=getattr(second, name)) for name in figures]
    for name, whole in (("time_seconds", first.step_seconds), ("memory_bytes", first.peak_bytes)):
        one, other = (msgspec.structs.asdict(getattr(estimate, name)) for estimate in (first, second))
        found += [
            Change(figure=f"{name}.{part}", first=one[part], second=other[part])
            for part in one
            if abs(other[part] - one[part]) > LEAST_SHOWN * whole
        ]
    return tuple(found)


def differences_table(differences: tuple[Difference, ...], names: tuple[str, str]) -> Table:
    table = Table(title="what differs", title_justify="left")
    for name in ("", *names):
        table.add_column(name, overflow="fold")
    for difference in differences:
        table.add_row(*map(Text, (difference.part, difference.first, difference.second)))
    return table


def changes_table(first: Estimate, second: Estimate, names: tuple[str, str]) -> Table:
    """Both estimates side by side."""
    table = Table(title=verdict(first, second, names), title_justify="left")
    for name in ("", *names, "change"):
        table.add_column(name, justify="left" if not name else "right")
    changes = {change.figure: change for change in estimate_changes(first, second)}
    _row(table, "step", changes["step_seconds"], format_seconds, bold=True)
    for part, words in TIME_WORDS.items():
        if change := changes.get(f"time_seconds.{part}"):
            _row(table, f"  {words}", change, format_seconds)
    _row(table, "tokens per second", changes["tokens_per_second"], lambda speed: f"{speed:,.0f}")
    _row(table, "model-flops utilisation", changes["model_flops_utilisation"], lambda share: f"{share:.1%}")
    needed = Change(figure="needed_bytes", first=first.needed_bytes, second=second.needed_bytes)
    _row(table, "memory per device", needed, format_bytes, bold=True)
    for part, words in MEMORY_WORDS.items():
        if change := changes.get(f"memory_bytes.{part}"):
            _row(table, f"  {words}", change, format_bytes)
    if first.host_bytes or second.host_bytes:
        _row(table, "memory per host", changes["host_bytes"], format_bytes)
    fits = ["fits" if estimate.fits else "does not fit" for estimate in (first, second)]
    table.add_row(f"budget of {format_bytes(second.budget_bytes)}", *fits, "")
    return table


def verdict(first: Estimate, second: Estimate, names: tuple[str, str]) -> str:
    """Which of the two is faster, and by how much."""
    share = second.step_seconds / first.step_seconds - 1
    if abs(share) < LEAST_SHOWN:
        return "both take the same time"
    faster, slower = (names[0], names[1]) if share > 0 else (names[1], names[0])
    ratio = max(first.step_seconds, second.step_seconds) / min(first.step_seconds, second.step_seconds)
    return f"{faster} is {ratio:.2f} × as fast as {slower}"


def _row(table: Table, name: str, change: Change, show: Callable[[float], str], *, bold: bool = False) -> None:
    share = f"{change.second / change.first - 1:+.1%}" if change.first else ""
    table.add_row(name, show(change.first), show(change.second), share, style="bold" if bold else None)


def _degree(axis: Axis) -> Callable[[Plan], str]:
    return lambda plan: str(plan.mesh.degrees[axis])


def _answer(field: str) -> Callable[[Plan], str]:
    return lambda plan: "yes" if getattr(plan, field) else "no"


def _stages(plan: Plan) -> str:
    return f"{', '.join(str(count) for count in stage_counts(plan))} blocks"


def _recompute(plan: Plan) -> str:
    return recompute_words(plan) if plan.recompute else "none"


def _offload(plan: Plan) -> str:
    return "none" if plan.offload.what == "none" else offload_words(plan)


_PARTS: dict[str, Callable[[Plan], str]] = {
    "model": lambda plan: plan.model,
    "graph": lambda plan: plan.graph,
    **{axis: _degree(axis) for axis in reversed(AXES)},
    "stages a rank": lambda plan: str(plan.virtual),
    "stages": _stages,
    "sequence parallel": _answer("sequence_parallel"),
    "attention under cp": lambda plan: CONTEXT_WORDS[plan.context],
    "ZeRO": lambda plan: str(plan.zero),
    "sharding group": lambda plan: str(plan.hybrid) if plan.hybrid else "all ranks with the same parameters",
    "recompute": _recompute,
    "offload": _offload,
    "schedule": lambda plan: kind_of(plan.schedule).title,
    "microbatch": lambda plan: str(plan.microbatch),
    "microbatches": lambda plan: str(plan.num_microbatches),
    "global batch": lambda plan: f"{plan.global_batch:,}",
    "precision": lambda plan: plan.precision,
    "compile": _answer("compile"),
    "batch norm over all ranks": _answer("sync_batch_norm"),
}


_SHORT: dict[str, Callable[[Plan], str]] = {
    "ZeRO": lambda plan: f"ZeRO {plan.zero}",
    "sharding group": lambda plan: f"groups of {plan.hybrid}" if plan.hybrid else "no groups",
    "recompute": lambda plan: f"recompute {plan.recompute_words}" if plan.recompute else "no recompute",
    "schedule": lambda plan: plan.schedule,
    "stages a rank": lambda plan: f"virtual {plan.virtual}",
    "microbatch": lambda plan: f"microbatch {plan.microbatch}",
    "offload": offload_in_short,
    "sequence parallel": lambda plan: "sequence parallel" if plan.sequence_parallel else "no sequence parallel",
    "attention under cp": lambda plan: f"context {plan.context}",
    "precision": lambda plan: plan.precision,
    "compile": lambda plan: "compiled" if plan.compile else "not compiled",
    "global batch": lambda plan: f"batch {plan.global_batch}",
}


def _split_otherwise(first: Plan, second: Plan) -> list[Difference]:
    """Tensors that lie over the same degrees in another way."""
    if (first.mesh.tp, first.mesh.cp) != (second.mesh.tp, second.mesh.cp):
        return []
    one, other = _shardings(first), _shardings(second)
    pairs = {name: (one.get(name, "whole"), other.get(name, "whole")) for name in sorted(one.keys() | other.keys())}
    return [
        Difference(part=f"sharding of {name}", first=before, second=after)
        for name, (before, after) in pairs.items()
        if before != after
    ]


def _shardings(plan: Plan) -> dict[str, str]:
    """Owner and name of each tensor that is cut → how."""
    return {
        f"{sharding.for_kind or ', '.join(sharding.for_blocks)}: {tensor.tensor}": _dims(tensor)
        for sharding in plan.sharding
        for tensor in sharding.tensors
        if any(tensor.dims)
    }


def _dims(tensor: TensorSharding) -> str:
    return f"[{', '.join(axis or '·' for axis in tensor.dims)}]" + (
        f" in {tensor.runs} runs" if tensor.runs > 1 else ""
    )
