"""`meshwright clusters`: the clusters that are known by name."""

from __future__ import annotations

from rich.table import Table

from meshwright.cli.options import JsonFlag
from meshwright.core.cluster import Cluster, Link, catalogue
from meshwright.core.units import format_bytes
from meshwright.jobs.output import make_console, print_json


def clusters(as_json: JsonFlag = False) -> None:
    """List the named clusters: what a host of each has, by its vendor's sheet."""
    found = [Cluster.named(name) for name in catalogue()]
    if as_json:
        print_json({cluster.name: cluster for cluster in found})
        return
    columns = ("name", "devices of a host", "memory", "16-bit peak", "link inside a host", "between hosts")
    table = Table(title="clusters", title_justify="left", caption_justify="left")
    table.caption = "link: of a device inside a host, of a host between hosts; (assumed): its owner did not publish it"
    for column in columns:
        table.add_column(column)
    for cluster in found:
        device = cluster.device
        table.add_row(
            cluster.name,
            f"{cluster.devices_per_host} × {device.name}",
            format_bytes(device.memory_bytes),
            f"{device.peak_flops_per_second / 1e12:.0f} TFLOP/s",
            _speed(cluster.intra_host),
            _speed(cluster.inter_host),
        )
    table.add_row("local", "this machine, measured: `meshwright probe`", "", "", "", "")
    make_console(as_json).print(table)


def _speed(link: Link | None) -> str:
    if link is None:
        return "none"
    return f"{link.bytes_per_second / 1e9:g} GB/s" + (" (assumed)" if link.origin == "assumed" else "")
