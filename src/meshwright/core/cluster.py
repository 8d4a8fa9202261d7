"""A Cluster: devices, hosts and links, each figure with its origin.

Two kinds of Cluster exist. A *probed* one carries measured points (rates by op kind and size, collectives by size),
taken with all ranks running at once. A *named* one carries vendor figures, from `clusters.json` beside this file.
"""

from __future__ import annotations

from importlib import resources
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from meshwright.core.codec import Value
from meshwright.core.collective import CollectiveKind
from meshwright.core.errors import InputError, nearest
from meshwright.core.graph import OpKind
from meshwright.core.units import GIB

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
RateType = Literal["fp64", "fp32", "bf16", "fp16"]
Origin = Literal["probe", "vendor sheet", "measured elsewhere", "assumed"]

FLOP_KINDS: tuple[OpKind, ...] = ("matmul", "convolution", "attention")
BYTE_KINDS: tuple[OpKind, ...] = ("elementwise", "transcendental", "normalisation", "reduction", "copy")

MATMUL_SHARE_OF_PEAK = 799 / 989
"""Share of the vendor's peak a large matmul reaches. Origin: bf16 on an H200, 799 measured of 989 TFLOP/s."""
COPY_SHARE_OF_PEAK = 4300 / 4800
"""Share of the vendor's memory bandwidth a copy reaches. Origin: an H200, 4,300 measured of 4,800 GB/s."""
ASSUMED_LAUNCH_SECONDS = 5e-6
"""Least time of one kernel where nothing was measured. Origin: assumed."""
ASSUMED_LATENCY_SECONDS = 10e-6
"""Latency of one hop where nothing was measured. Origin: assumed."""
ASSUMED_INTER_HOST_BYTES_PER_SECOND = 25e9
"""A host's outer link where its owner published none (200 Gb/s). Origin: assumed."""


class Rate(Value, kw_only=True):
    """How fast one kind of op runs at one size: flops/s for matmul, convolution and attention, bytes/s for the rest.

    size: flops of one such op, or bytes read and written by it.
    """

    kind: OpKind
    dtype: RateType
    size: Positive
    per_second: Positive


class CollectiveTime(Value, kw_only=True):
    """Seconds a collective with this many input bytes took between this many ranks."""

    kind: CollectiveKind
    num_ranks: Count
    num_bytes: Count
    seconds: Positive


class Link(Value, kw_only=True):
    """One way of a link: between devices of a host (per device), or between hosts (per host)."""

    bytes_per_second: Positive
    latency_seconds: Positive
    origin: Origin


class Device(Value, kw_only=True):
    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: Annotated[int, Meta(gt=0)]
    rates: tuple[Rate, ...]
    launch_seconds: Positive
    """Least time of an op in forward, Python included."""
    backward_launch_seconds: Positive | None = None
    """The same in backward, where no Python runs; without it, as in forward."""
    update_elements_per_second: Positive | None = None
    """How fast AdamW updates parameters held here; without it, memory bandwidth decides."""
    overlap_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """How much of the shorter of compute and communication disappears when both run at once."""
    peak_flops_per_second: Positive
    """What utilisation is counted against: the best matmul rate measured, or the vendor's peak."""


class Cluster(Value, kw_only=True):
    format: Literal[1] = 1
    name: str
    origin: Origin
    num_hosts: Count = 1
    devices_per_host: Count
    device: Device
    intra_host: Link | None = None
    inter_host: Link | None = None
    collectives: tuple[CollectiveTime, ...] = ()
    host_memory_bytes: Annotated[int, Meta(ge=0)] | None = None
    notes: tuple[str, ...] = ()
    """Where figures came from, in words."""

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @classmethod
    def named(cls, name: str, hosts: int = 1) -> Self:
        """A cluster from the catalogue, with this many hosts."""
        facts = catalogue()
        if name == "local":
            raise InputError(
                "'local' is this machine and is measured, not named: call probe(), or run `meshwright probe`"
            )
        if name not in facts:
            raise InputError(f"no cluster is called '{name}': {nearest(name, [*facts, 'local'])}")
        found: Self = from_facts(name, facts[name], cls)
        return msgspec.structs.replace(found, num_hosts=check_hosts(hosts))


def check_hosts(hosts: int) -> int:
    if hosts < 1:
        raise InputError(f"--hosts is {hosts}: a cluster has at least one host")
    return hosts


def catalogue() -> dict[str, dict[str, Any]]:
    """The facts of every named cluster."""
    text = resources.files("meshwright.core").joinpath("clusters.json").read_text(encoding="utf-8")
    return {name: facts for name, facts in msgspec.json.decode(text).items() if isinstance(facts, dict)}


def from_facts(name: str, facts: dict[str, Any], cls: type[Cluster] = Cluster) -> Any:
    """Vendor facts → a Cluster; what the facts leave open is assumed and noted."""
    return cls(
        name=name,
        origin="vendor sheet",
        devices_per_host=facts["devices_per_host"],
        device=_device(facts),
        intra_host=_link(facts.get("intra_host_gb_per_second_per_device"), "vendor sheet"),
        inter_host=_inter_host(facts),
        host_memory_bytes=round(facts["host_memory_gib"] * GIB) if facts.get("host_memory_gib") else None,
        notes=tuple(_notes(facts)),
    )


def _device(facts: dict[str, Any]) -> Device:
    peak = 1e12 * (facts.get("peak_bf16_tflops") or facts["peak_fp16_tflops"])
    return Device(
        name=facts["device"],
        kind="cuda",
        memory_bytes=round(facts["memory_gib"] * GIB),
        rates=_rates(facts, peak),
        launch_seconds=ASSUMED_LAUNCH_SECONDS,
        peak_flops_per_second=peak,
    )


def _rates(facts: dict[str, Any], peak: float) -> tuple[Rate, ...]:
    """One point a kind and dtype: without measurements the rate does not depend on size."""
    half = 1e12 * facts.get("measured_bf16_matmul_tflops", 0) or peak * MATMUL_SHARE_OF_PEAK
    copied = facts.get("measured_hbm_copy_gb_per_second") or facts["hbm_gb_per_second"] * COPY_SHARE_OF_PEAK
    matmul: dict[RateType, float] = {"fp32": _full_rate(facts, half), "fp16": half}
    if facts.get("peak_bf16_tflops"):
        matmul["bf16"] = half
    return tuple(
        Rate(kind=kind, dtype=dtype, size=1.0, per_second=flops if kind in FLOP_KINDS else 1e9 * copied)
        for kind in (*FLOP_KINDS, *BYTE_KINDS)
        for dtype, flops in matmul.items()
    )


def _full_rate(facts: dict[str, Any], half: float) -> float:
    """fp32 through TF32 units at half the 16-bit rate, or through plain units where the device has no others."""
    plain = facts.get("peak_fp32_tflops")
    return 1e12 * plain * MATMUL_SHARE_OF_PEAK if plain else half / 2


def _link(gb_per_second: float | None, origin: Origin) -> Link | None:
    if gb_per_second is None:
        return None
    return Link(bytes_per_second=gb_per_second * 1e9, latency_seconds=ASSUMED_LATENCY_SECONDS, origin=origin)


def _inter_host(facts: dict[str, Any]) -> Link | None:
    published = facts.get("inter_host_gb_per_second_per_host")
    if published is None:
        return _link(ASSUMED_INTER_HOST_BYTES_PER_SECOND / 1e9, "assumed")
    return _link(published, "vendor sheet")


def _notes(facts: dict[str, Any]) -> list[str]:
    notes = []
    if "measured_bf16_matmul_tflops" not in facts:
        notes.append(f"matmul rate: {MATMUL_SHARE_OF_PEAK:.2f} of the vendor's peak, the share measured on an H200")
    if not facts.get("peak_bf16_tflops"):
        notes.append("no bf16 units: plan for fp16 or fp32")
    if facts.get("inter_host_gb_per_second_per_host") is None:
        notes.append("link between hosts: not published, assumed 25 GB/s per host")
    notes.append("latencies and the least kernel time are assumed")
    return notes
