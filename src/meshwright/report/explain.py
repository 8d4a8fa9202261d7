"""Where an estimate comes from: every figure of the cluster and constant of the model, with unit and origin."""

from __future__ import annotations

import msgspec
from rich.table import Table

from meshwright.core.cluster import Cluster, Link
from meshwright.core.codec import Value
from meshwright.core.units import format_bytes

MEANINGS: dict[str, tuple[str, str]] = {
    "num_multiprocessors": ("", "matmul tiles that run at once"),
    "matmul_share": ("of peak", "rate of a large matmul whose tiles fill every wave"),
    "matmul_ramp_seconds": ("s", "start and end of a tile of 256 × 128, in which it does no sums"),
    "matmul_aligned_by_4_share": ("of rate", "matmul whose widths divide by 4 but not by 8"),
    "matmul_aligned_by_2_share": ("of rate", "matmul whose widths divide by 2 but not by 4"),
    "matmul_unaligned_share": ("of rate", "matmul with an odd width"),
    "attention_share": ("of peak", "fused attention, long sequences, heads 128 wide, forward"),
    "attention_backward_share": ("of peak", "the same, backward"),
    "attention_ramp_length": ("tokens", "sequence length at which fused attention reaches half its rate"),
    "narrow_head_share": ("of rate", "fused attention with heads 64 wide against 128"),
    "elementwise_share": ("of memory bandwidth", "adding, multiplying"),
    "cast_up_share": ("of memory bandwidth", "copies into a wider dtype"),
    "transcendental_share": ("of memory bandwidth", "gelu, silu, exp"),
    "normalisation_share": ("of memory bandwidth", "layer norm, forward"),
    "normalisation_backward_share": ("of memory bandwidth", "layer norm, backward"),
    "softmax_share": ("of memory bandwidth", "softmax and log-softmax"),
    "reduction_share": ("of memory bandwidth", "sums"),
    "fused_share": ("of memory bandwidth", "groups of ops that compiling fuses"),
    "copy_share": ("of memory bandwidth", "copies, embeddings"),
    "update_share": ("of memory bandwidth", "fused AdamW: seven fp32 tensors read or written"),
    "kernel_floor_seconds": ("s", "least time of one kernel on the device"),
    "launch_seconds": ("s", "host time of one eager op in forward, Python and views included"),
    "backward_launch_seconds": ("s", "the same in backward"),
    "compiled_launch_seconds": ("s", "the same for a kernel of compiled code"),
    "intra_host_share": ("of the link", "what a collective reaches inside a host"),
    "inter_host_share": ("of the link", "what a collective reaches between hosts"),
    "hop_seconds": ("s", "latency of one hop of a ring between hosts"),
    "inner_hop_seconds": ("s", "latency of one hop of a ring inside a host"),
    "overlap_slowdown": ("of hidden time", "how much compute slows while communication runs beside it"),
    "step_overhead_seconds": ("s", "what a step takes beside its microbatches: data, logging, waiting for the slowest"),
    "context_bytes": ("bytes", "what the driver and libraries hold of a device"),
    "communicator_bytes": ("bytes", "buffers of one group of ranks that communicate"),
    "allocator_slack_share": ("of allocated", "what the allocator holds but tensors do not use"),
    "compiled_slack_share": ("of allocated", "the same for compiled code, which makes fewer tensors"),
    "assumed_inter_host_gb_per_second": ("GB/s", "a host's outer link where its owner published none"),
}
"""Of every constant of the cost model (core/constants.py): its unit and meaning."""


class Figure(Value, kw_only=True):
    """One number an estimate rests on."""

    name: str
    value: float
    unit: str
    origin: str
    meaning: str = ""


def figures(cluster: Cluster) -> tuple[Figure, ...]:
    """Vendor figures, links and constants of a cluster; of a probed one, what was measured."""
    device, sheet = cluster.device, "vendor sheet"
    found = [_figure("memory_bytes", device.memory_bytes, "bytes", cluster.origin, "of one device")]
    found += [
        _figure(f"peak_{dtype}", peak, "flop/s", sheet, f"matmuls in {dtype}") for dtype, peak in device.peaks.items()
    ]
    if device.bytes_per_second:
        found.append(_figure("bytes_per_second", device.bytes_per_second, "bytes/s", sheet, "memory of one device"))
    found += _link("intra_host", cluster.intra_host, "between devices of a host, per device each way")
    found += _link("inter_host", cluster.inter_host, "between hosts, per host each way")
    found += _link("host_link", cluster.host_link, "between a device and its host's memory, each way")
    if cluster.disk_bytes_per_second:
        rate, meaning = cluster.disk_bytes_per_second, "written to a host's disk for good, by all its ranks together"
        found.append(_figure("disk_bytes_per_second", rate, "bytes/s", cluster.origin, meaning))
    return (*found, *(_constants(cluster) if device.constants else _measured(cluster)))


def _figure(name: str, value: float, unit: str, origin: str, meaning: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, origin=origin, meaning=meaning)


def _link(name: str, link: Link | None, meaning: str) -> list[Figure]:
    return [_figure(name, link.bytes_per_second, "bytes/s", link.origin, meaning)] if link else []


def _constants(cluster: Cluster) -> list[Figure]:
    found = []
    for name, value in msgspec.structs.asdict(cluster.device.constants).items() if cluster.device.constants else ():
        unit, meaning = MEANINGS[name]
        found.append(_figure(name, value, unit, cluster.device.origins.get(name, "assumed"), meaning))
    return found


def _measured(cluster: Cluster) -> list[Figure]:
    device, origin = cluster.device, cluster.origin
    found = [
        _figure(f"{rate.kind}_{rate.dtype}", rate.per_second, "flop/s or bytes/s", origin, f"at size {rate.size:.3g}")
        for rate in device.rates
    ]
    found.append(_figure("launch_seconds", device.launch_seconds, "s", origin, "one op in forward"))
    for point in cluster.collectives:
        name = f"{point.kind} of {format_bytes(point.num_bytes)}"
        found.append(_figure(name, point.seconds, "s", origin, f"between {point.num_ranks} ranks"))
    return found


def explain_table(cluster: Cluster) -> Table:
    table = Table(title=f"what the estimate rests on: {cluster.name}", title_justify="left")
    for name in ("figure", "value", "unit", "origin", "meaning"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for figure in figures(cluster):
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, figure.origin, figure.meaning)
    for note in cluster.notes:
        table.add_row("note", "", "", "", note)
    return table
