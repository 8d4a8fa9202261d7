"""A Cluster: devices, hosts and links, each figure with its origin.

Two kinds of Cluster exist. A *probed* one carries measured points (rates by op kind and size, collectives by size),
taken with all ranks running at once. A *named* one carries vendor figures, from `clusters.json` beside this file, and the
constants of its family of devices (`core/constants.py`).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from meshwright.core.bounds import MOST_RANKS, Count, CountOrZero, Degree, NotNegative, Positive, Share
from meshwright.core.codec import CheckedValue, Value, decode, decode_json, load
from meshwright.core.collective import CollectiveKind
from meshwright.core.constants import Constants, Origin, family_of
from meshwright.core.errors import InputError, check_number, nearest
from meshwright.core.graph import OpKind
from meshwright.core.units import GIB

RateType = Literal["fp64", "fp32", "bf16", "fp16"]

FLOP_KINDS: tuple[OpKind, ...] = ("matmul", "convolution", "attention")

ASSUMED_HOST_LINK_GB_PER_SECOND = 25.0
"""Bandwidth from a device to its host's memory where none was published: PCIe 4.0. Origin: assumed."""


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
    num_ranks: Degree
    num_bytes: Count
    seconds: Positive


class Link(Value, kw_only=True):
    """One way of a link: between devices of a host (per device), or between hosts (per host)."""

    bytes_per_second: Positive
    latency_seconds: Positive | None = None
    """Latency of one hop; without it, the constant of the device's family."""
    origin: Origin


class Alone(Value, kw_only=True):
    """Rates of a device while the others of its host idle: cores of one host share its memory."""

    rates: tuple[Rate, ...]
    launch_seconds: Positive
    backward_launch_seconds: Positive
    update_elements_per_second: Positive


class Device(Value, kw_only=True):
    """One kind of accelerator (or a CPU) with what was measured of it, or with its peaks and the constants of its family."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: Count
    rates: tuple[Rate, ...]
    launch_seconds: Positive
    """Least time of an op in forward, Python included."""
    backward_launch_seconds: Positive | None = None
    """The same in backward, where no Python runs; without it, as in forward."""
    split_launch_seconds: Positive | None = None
    """The same in forward where tp or cp splits tensors, and each op follows a rule; without it, as elsewhere."""
    halves_launch_seconds: Positive | None = None
    """The same in forward where a schedule runs backward in halves, what that adds to backward included."""
    update_elements_per_second: Positive | None = None
    """How fast AdamW updates parameters held here; without it, memory bandwidth decides."""
    overlap_share: Share = 1.0
    """How much of the shorter of compute and communication disappears when both run at once."""
    shard_call_seconds: NotNegative = 0.0
    """Host time of each collective of sharded parameters; 0 where the host runs ahead of the device."""
    alone: Alone | None = None
    """Rates while the other devices idle; without them, the rates above hold."""
    peak_flops_per_second: Positive
    """The rate that utilisation is relative to: the best matmul rate measured, or the vendor's peak."""
    peaks: dict[RateType, Positive] = msgspec.field(default_factory=dict)
    """The vendor's peak by dtype, flops per second; for a device that was not probed."""
    bytes_per_second: Positive | None = None
    """The vendor's memory bandwidth; for a device that was not probed."""
    constants: Constants | None = None
    """Constants of its family; for a device that was not probed."""
    origins: dict[str, str] = msgspec.field(default_factory=dict)
    """Where each constant came from."""


class Cluster(Value, kw_only=True):
    """Hosts with devices, and the links inside and between them; each figure with its origin.

    mw.probe()                                            # this machine, measured
    mw.Cluster.named("a100-80g-selene", hosts=8)          # of the catalogue, `core/clusters.json`
    mw.Cluster.load("cluster.toml")                       # described by hand, or saved by `meshwright probe -o`
    """

    format: Literal[1] = 1
    name: str
    origin: Origin
    num_hosts: Degree = 1
    devices_per_host: Degree
    device: Device
    intra_host: Link | None = None
    inter_host: Link | None = None
    host_link: Link | None = None
    """Between a device and its host's memory, each way."""
    host_updates_per_second: Positive | None = None
    """Parameters per second that AdamW updates in a host's memory, all its cores together."""
    disk_bytes_per_second: Positive | None = None
    """Rate at which all ranks of a host together write to its disk, flushes included."""
    collectives: tuple[CollectiveTime, ...] = ()
    host_memory_bytes: CountOrZero | None = None
    notes: tuple[str, ...] = ()
    others_share: Share = 0.0
    """Share of CPU time used by other programs while the cluster was measured."""

    def __post_init__(self) -> None:
        if self.num_devices > MOST_RANKS:
            raise InputError(
                f"num_hosts {self.num_hosts} × devices_per_host {self.devices_per_host} are {self.num_devices} devices: a cluster "
                f"has at most {MOST_RANKS}"
            )

    def seen_by(self, world: int) -> Cluster:
        """The cluster with the rates that a plan of `world` ranks reaches: a single rank has its host to itself."""
        alone = self.device.alone
        if world > 1 or alone is None:
            return self
        figures = {name: getattr(alone, name) for name in alone.__struct_fields__}
        return msgspec.structs.replace(self, device=msgspec.structs.replace(self.device, alone=None, **figures))

    @property
    def num_devices(self) -> int:
        """Of all hosts."""
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
        found: Self = from_facts(name, facts[name], cls=cls)
        return msgspec.structs.replace(found, num_hosts=check_hosts(hosts))


def check_hosts(hosts: int) -> int:
    check_number("--hosts", hosts)
    if hosts > MOST_RANKS:
        raise InputError(f"--hosts is {hosts}: a cluster has at most {MOST_RANKS} hosts")
    return hosts


class Facts(CheckedValue, kw_only=True):
    """A cluster as its vendor describes it, as in `clusters.json`. Bandwidths are 1e9 bytes per second each way."""

    device: str
    devices_per_host: Degree
    memory_gib: Positive
    hbm_gb_per_second: Positive
    peak_bf16_tflops: Positive | None = None
    peak_fp16_tflops: Positive | None = None
    peak_fp32_tflops: Positive | None = None
    intra_host_gb_per_second_per_device: Positive | None = None
    inter_host_gb_per_second_per_host: Positive | None = None
    inter_host: str = ""
    host_link_gb_per_second: Positive | None = None
    host_memory_gib: Positive | None = None
    host_cores: Degree | None = None
    measured_bf16_matmul_tflops: Positive | None = None
    measured_hbm_copy_gb_per_second: Positive | None = None
    measured_host_to_device_gb_per_second: Positive | None = None
    measured_device_to_host_gb_per_second: Positive | None = None
    measured_both_ways_gb_per_second_each: Positive | None = None
    measured_host_fused_adamw_gparams_per_second: Positive | None = None
    measured_disk_write_gb_per_second: Positive | None = None
    measured_disk_read_gb_per_second: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peak_bf16_tflops is None and self.peak_fp16_tflops is None:
            raise InputError("neither peak_bf16_tflops nor peak_fp16_tflops is given: give the vendor's peak")


def catalogue() -> dict[str, Facts]:
    """The facts of every named cluster."""
    text = resources.files("meshwright.core").joinpath("clusters.json").read_text(encoding="utf-8")
    return read_facts(text, "clusters.json")


def read_facts(text: str | bytes, where: str) -> dict[str, Facts]:
    """A file like `clusters.json`: name → facts; entries that are not objects are notes."""
    entries = decode_json(text, dict[str, Any], where)
    return {
        name: decode(entry, Facts, f"{where}: {name}") for name, entry in entries.items() if isinstance(entry, dict)
    }


def load_cluster(path: str) -> Cluster:
    """A cluster's file: one that `meshwright probe` saved, or facts from a data sheet, where `device` is a name."""
    raw = load(path, dict[str, Any])
    if isinstance(raw.get("device"), str):
        found: Cluster = from_facts(Path(path).stem, decode(raw, Facts, path))
        return found
    return decode(raw, Cluster, path)


def from_facts(name: str, facts: Facts, without: str | None = None, cls: type[Cluster] = Cluster) -> Any:
    """Vendor facts → a Cluster; what the facts leave open is assumed and noted.

    without: a table of published runs that the constants must not be fitted to.
    """
    updates = facts.measured_host_fused_adamw_gparams_per_second
    return cls(
        name=name,
        origin="vendor sheet",
        devices_per_host=facts.devices_per_host,
        device=_device(facts, without),
        intra_host=_link((facts.intra_host_gb_per_second_per_device, "vendor sheet")),
        inter_host=_link(
            (facts.inter_host_gb_per_second_per_host, "vendor sheet"), (_assumed_inter_host(facts), "assumed")
        ),
        host_link=_link(
            (facts.measured_both_ways_gb_per_second_each, "measured elsewhere"),
            (facts.host_link_gb_per_second, "vendor sheet"),
            (ASSUMED_HOST_LINK_GB_PER_SECOND, "assumed"),
        ),
        host_updates_per_second=1e9 * updates if updates else None,
        host_memory_bytes=round(facts.host_memory_gib * GIB) if facts.host_memory_gib else None,
        notes=tuple(_notes(facts)),
    )


def _device(facts: Facts, without: str | None) -> Device:
    half = 1e12 * (facts.peak_bf16_tflops or facts.peak_fp16_tflops or 0)
    family = family_of(facts.device, without)
    peaks: dict[RateType, float] = {
        "fp16": half,
        "fp32": 1e12 * facts.peak_fp32_tflops if facts.peak_fp32_tflops else half / 2,
    }
    if facts.peak_bf16_tflops:
        peaks["bf16"] = half
    return Device(
        name=facts.device,
        kind="cuda",
        memory_bytes=round(facts.memory_gib * GIB),
        rates=(),
        launch_seconds=family.constants.launch_seconds,
        backward_launch_seconds=family.constants.backward_launch_seconds,
        peak_flops_per_second=half,
        peaks=peaks,
        bytes_per_second=1e9 * facts.hbm_gb_per_second,
        constants=family.constants,
        origins=family.origins,
    )


def _link(*figures: tuple[float | None, Origin]) -> Link | None:
    """A link with the first figure that is known, in 1e9 bytes per second."""
    known = ((figure, origin) for figure, origin in figures if figure is not None)
    return next((Link(bytes_per_second=figure * 1e9, origin=origin) for figure, origin in known), None)


def _assumed_inter_host(facts: Facts) -> float:
    return family_of(facts.device).constants.assumed_inter_host_gb_per_second


def _notes(facts: Facts) -> list[str]:
    notes = []
    if not facts.peak_bf16_tflops:
        notes.append("no bf16 units: plan for fp16 or fp32")
    if facts.inter_host_gb_per_second_per_host is None:
        notes.append(f"link between hosts: not published, assumed {_assumed_inter_host(facts):g} GB/s per host")
    if facts.peak_fp32_tflops is None:
        notes.append("fp32 matmuls: through TF32 units, at half the 16-bit peak")
    notes.append("rates, latencies and launch times: constants of the device's family, see --explain")
    return notes
