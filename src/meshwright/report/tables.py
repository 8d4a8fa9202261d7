"""Tables for the terminal: a model, a cluster, one estimate, and what was predicted against what was measured."""

from __future__ import annotations

import io
from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table

from meshwright.core.cluster import FLOP_KINDS, Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.result import describe
from meshwright.core.run.trace import Trace
from meshwright.core.units import format_bytes, format_count, format_seconds
from meshwright.cost.memory.activations import Activations, activations_by_block, total_activations
from meshwright.report.comparison import comparison_sections
from meshwright.report.words import MEMORY_WORDS, model_size

TABLE_WIDTH = 100


def estimate_table(plan: Plan, estimate: Estimate) -> Table:
    """One plan's predicted step and memory."""
    table = Table(title=describe(plan), title_justify="left")
    table.add_column("predicted")
    table.add_column("", justify="right")
    table.add_row("step", format_seconds(estimate.step_seconds), style="bold")
    if estimate.rates is not None:
        table.add_row("  seconds are", estimate.origin_words, style="yellow" if estimate.rates == "assumed" else "dim")
    for part, seconds in msgspec.structs.asdict(estimate.time_seconds).items():
        if seconds:
            table.add_row(f"  {part.replace('_', ' ')}", format_seconds(seconds))
    table.add_row("tokens per second", f"{estimate.tokens_per_second:,.0f}")
    table.add_row("model-flops utilisation", f"{estimate.model_flops_utilisation:.1%}")
    fits = "fits" if estimate.fits else "does not fit"
    words = f"{format_bytes(estimate.needed_bytes)} of {format_bytes(estimate.budget_bytes)}: {fits}"
    table.add_row("memory per device", words, style="bold")
    if estimate.needed_bytes != estimate.peak_bytes:
        table.add_row("  allocated at the peak", format_bytes(estimate.peak_bytes))
    for part, num_bytes in msgspec.structs.asdict(estimate.memory_bytes).items():
        if num_bytes:
            table.add_row(f"    {MEMORY_WORDS[part]}", format_bytes(num_bytes))
    if estimate.reserved_bytes:
        table.add_row("  the allocator's slack", format_bytes(estimate.reserved_bytes - estimate.peak_bytes))
        table.add_row("  held by the driver", format_bytes(estimate.context_bytes))
    if estimate.host_bytes:
        table.add_row("memory per host", format_bytes(estimate.host_bytes))
    if estimate.worst_moment:
        table.add_row("fullest", f"rank {estimate.worst_rank}, {estimate.worst_moment}")
    return table


def comparison_table(estimate: Estimate, trace: Trace, unit: str = "tokens") -> Table:
    """Predicted against measured: step time and its parts, memory by category, collectives. unit: what the speed counts."""
    table = Table(title="predicted against measured", title_justify="left")
    table.add_column("")
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right")
    for section in comparison_sections(estimate, trace, unit):
        for row in section:
            table.add_row(*row.cells, style="bold" if row.is_total else None)
        table.add_section()
    return table


def predicted_vs_measured(estimate: Estimate, trace: Trace) -> str:
    """The comparison as plain text."""
    return as_text(comparison_table(estimate, trace))


def graph_table(graph: Graph, seconds: float) -> Table:
    """Parameters, flops and what is kept for backward by block, per sample; equal neighbours share a row."""
    table = Table(
        title=f"{graph.model}: {model_size(graph)}, captured in {format_seconds(seconds)}",
        title_justify="left",
        caption="each block, per sample; kept: bytes in use at the end of forward without, with selective and with full recompute",
        caption_justify="left",
    )
    for name in ("blocks", "kind", "parameters", "flops", "kept", "kept, selective", "kept, full"):
        table.add_column(name, justify="left" if name in ("blocks", "kind") else "right")
    parameters, kinds, kept = graph.num_parameters_by_block, graph.kind_by_block, activations_by_block(graph, 1)
    for names in _equal_neighbours(graph):
        first = names[0]
        _graph_row(table, (_folded(names), kinds[first].name), parameters[first], kinds[first].flops(1), kept[first])
    table.add_section()
    _graph_row(table, ("all", ""), graph.num_parameters, graph.flops(1), total_activations(graph, 1), style="bold")
    return table


def guesses_table(graph: Graph) -> Table:
    """What the graph assumes about values that are not known before the model runs."""
    table = Table(title="guesses", title_justify="left")
    for name in ("module", "line", "asked for", "assumed"):
        table.add_column(name)
    for guess in graph.guesses:
        table.add_row(guess.module or "root", guess.line, guess.question, guess.answer)
    return table


def _graph_row(
    table: Table, words: tuple[str, str], parameters: float, flops: float, kept: Activations, style: str | None = None
) -> None:
    sizes = (format_bytes(size) for size in (kept.none, kept.selective, kept.full))
    table.add_row(*words, format_count(parameters), format_count(flops), *sizes, style=style)


def _equal_neighbours(graph: Graph) -> list[list[str]]:
    """Names of consecutive blocks of one kind and one container with equally many parameters."""
    parameters = graph.num_parameters_by_block
    found = groupby(graph.blocks, key=lambda b: (b.kind, b.name.rpartition(".")[0], parameters[b.name]))
    return [[block.name for block in blocks] for _, blocks in found]


def _folded(names: list[str]) -> str:
    """`blocks.0-95` for the first to the last of them."""
    if len(names) == 1:
        return names[0] or "(outside)"
    return f"{names[0]}-{names[-1].rpartition('.')[2]}"


def cluster_table(cluster: Cluster) -> Table:
    """What is known about a cluster, with the best rate of each kind of op."""
    table = Table(
        title=f"{cluster.name}: {cluster.num_hosts} × {cluster.devices_per_host} × {cluster.device.name}",
        title_justify="left",
    )
    table.add_column("figure")
    table.add_column(f"from {cluster.origin}", justify="right")
    device = cluster.device
    table.add_row("memory per device", format_bytes(device.memory_bytes))
    for kind, dtype in sorted({(rate.kind, rate.dtype) for rate in device.rates}):
        best = max(rate.per_second for rate in device.rates if (rate.kind, rate.dtype) == (kind, dtype))
        unit = "GFLOP/s" if kind in FLOP_KINDS else "GB/s"
        table.add_row(f"{kind}, {dtype}", f"{best / 1e9:,.1f} {unit}")
    table.add_row("least time of an op, forward", format_seconds(device.launch_seconds))
    if device.backward_launch_seconds is not None:
        table.add_row("least time of an op, backward", format_seconds(device.backward_launch_seconds))
    if device.split_launch_seconds is not None:
        table.add_row("least time of an op, split over tp or cp", format_seconds(device.split_launch_seconds))
    if device.halves_launch_seconds is not None:
        table.add_row("least time of an op, backward in halves", format_seconds(device.halves_launch_seconds))
    if device.update_elements_per_second is not None:
        table.add_row("AdamW", f"{device.update_elements_per_second / 1e6:,.0f} M parameters/s")
    table.add_row("compute hides communication", f"{device.overlap_share:.0%}")
    if device.shard_call_seconds:
        table.add_row("sharding, beside each collective", format_seconds(device.shard_call_seconds))
    for name in dict.fromkeys(point.kind for point in cluster.collectives):
        points = [point for point in cluster.collectives if point.kind == name]
        fastest = max(point.num_bytes / point.seconds for point in points)
        words = f"{format_seconds(points[0].seconds)}, {fastest / 1e9:.2f} GB/s"
        table.add_row(f"{name.replace('_', '-')} between {points[0].num_ranks}", words)
    for place, link in (("link inside a host", cluster.intra_host), ("link between hosts", cluster.inter_host)):
        if link is not None:
            speed = link.bytes_per_second
            words = f"{speed / 1e9:,.1f} GB/s" if speed >= 1e9 else f"{speed / 1e6:,.1f} MB/s"
            table.add_row(place, f"{words} ({link.origin})")
    if cluster.others_share:
        table.add_row("cores taken by others meanwhile", f"{cluster.others_share:.0%}")
    return table


def as_text(table: Table, width: int = TABLE_WIDTH) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=width, markup=False).print(table)
    return buffer.getvalue()
