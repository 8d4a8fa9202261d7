"""Where an estimate's rates come from, and how far estimates by such rates have been off."""

from __future__ import annotations

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import RatesOrigin

ERROR_OF_SHEETS = 0.05
"""Median error of a step on other people's clusters, from vendors' figures (docs/accuracy.md)."""
ERROR_OF_PROBES = 0.05
"""Of a step on a GPU that was measured (docs/accuracy.md)."""
ERROR_OF_PROBED_CPUS = 0.07
"""On a CPU that was measured, between plans that use it differently: cores share caches and memory (docs/performance.md)."""


def rates_origin(cluster: Cluster) -> RatesOrigin:
    device = cluster.device
    if device.constants is None:
        return "probe"
    known = any(not origin.startswith("assumed") for origin in device.origins.values())
    return "family" if known else "assumed"


def error_share(cluster: Cluster) -> float | None:
    """None for a device whose constants are assumed: no run on one was compared."""
    return None if rates_origin(cluster) == "assumed" else error_band(cluster)


def error_band(cluster: Cluster) -> float:
    """Relative difference of two estimates below which neither plan is known to be faster."""
    if cluster.origin != "probe":
        return ERROR_OF_SHEETS
    return ERROR_OF_PROBED_CPUS if cluster.device.kind == "cpu" else ERROR_OF_PROBES
