"""Measure this machine with all ranks running at once: that is the speed they will have.

Every figure is the slowest rank's median. What is measured, and how:

    rates          flops/s or bytes/s of each kind of op at several sizes            -> kernels.measure_rates
    launch         seconds per op of a model too small to compute anything           -> kernels.measure_launches
    split launch   the same where each op follows a rule for split tensors           -> splitting.measure_split_launch
    halves launch  the same where gradients of weights are put off                   -> splitting.measure_halves_launch
    update         parameters per second through AdamW                               -> kernels.measure_update
    collectives    seconds by kind and input bytes, between all ranks                -> links.measure_collectives
    alone          the same rates of one rank while the others wait                    -> _measure_alone
    host           the link to the host's memory, and how fast the host updates               -> host.measure_host
    disk           how fast state goes to the host's disk                                      -> host.measure_disk
    links          bandwidth and latency; on several hosts, inside each apart        -> links.link_of, links.measure_host_link
    each link      between each two hosts, in the notes                              -> host_links.measure_host_links
    sharding       seconds that fully_shard adds to each of its collectives              -> sharding.measure_shard_call
    overlap        share of the shorter of matmul and all-reduce hidden when both run -> links.measure_overlap

Where more ranks share a host's processor than it has cores, one rank a core measures what a rank does by itself, and all ranks
get an equal share of that: sixteen ranks on two cores would measure the same eight times as long.            -> Turn
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.core.cluster import Alone, Cluster, Device, Rate
from meshwright.core.codec import stable_hash
from meshwright.core.errors import InputError
from meshwright.core.files.cache import cache_folder
from meshwright.measure import kernels, links
from meshwright.measure.host import measure_disk, measure_host
from meshwright.measure.host_links import measure_host_links, notes_on
from meshwright.measure.others import BUSY_SHARE, Others, share_now
from meshwright.measure.sharding import measure_shard_call
from meshwright.measure.splitting import measure_halves_launch, measure_split_launch
from meshwright.runtime.affinity import local_cores
from meshwright.runtime.host_memory import physical_bytes
from meshwright.runtime.launch import launch
from meshwright.runtime.messages.exchange import all_ranks, from_first
from meshwright.runtime.offload.threads import ranks_here
from meshwright.runtime.ranks import BackendChoice, DeviceChoice, Rank, joined

PROBE_VERSION = 10
"""Raised when a probe measures other things than before: older measurements are then not used."""


def probe(
    nproc: int | None = None,
    *,
    device: DeviceChoice = "auto",
    backend: BackendChoice = "auto",
    fresh: bool = False,
    on_start: Callable[[], None] | None = None,
) -> Cluster:
    """This machine as a Cluster of `nproc` devices; measured once, then read from the cache.

    What was measured while others used the cores is measured again when they use them less. on_start: called before anything
    is measured, which takes some seconds.
    """
    num_ranks = nproc or default_num_ranks(device)
    path = cache_file(num_ranks, device, backend)
    known = None if fresh else read_cache(path)
    if known is not None and not (known.others_share > BUSY_SHARE and share_now() < known.others_share / 2):
        return known
    if on_start is not None:
        on_start()
    others = Others()
    cluster = Cluster.from_json(
        launch("meshwright.measure.probe:probe_rank", {"device": device, "backend": backend}, num_ranks)
    )
    cluster = msgspec.structs.replace(cluster, others_share=round(others.share(), 2))
    with suppress(OSError):  # a cache that cannot be written is not worth failing for
        cluster.save(path)
    return cluster


def read_cache(path: Path) -> Cluster | None:
    if not path.exists():
        return None
    try:
        return Cluster.load(path)
    except InputError:
        with suppress(OSError):
            path.unlink()  # written by another version: measure again
        return None


def default_num_ranks(device: DeviceChoice = "auto") -> int:
    """One rank a GPU, or a core."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, len(os.sched_getaffinity(0)))


def cache_file(num_ranks: int, device: str, backend: str) -> Path:
    """One file per machine, torch version and number of ranks."""
    facts = (
        PROBE_VERSION,
        platform.node(),
        cpu_name(),
        os.cpu_count(),
        str(torch.__version__),
        num_ranks,
        device,
        backend,
        gpu_name(),
    )
    return cache_folder() / f"cluster-{stable_hash(facts)}.json"


def probe_rank(payload: dict[str, Any]) -> str:
    """What each rank of a probe runs."""
    with joined(payload["device"], payload["backend"]) as rank:
        return measure_cluster(rank).to_json()


@dataclass(frozen=True)
class Turn:
    """Whether this rank is among those that measure what ranks do by themselves, and how many of a host's are."""

    is_ours: bool
    num_measuring: int
    per_host: int

    @property
    def share(self) -> float:
        """Of a core, what each rank has."""
        return self.num_measuring / self.per_host


def _turn(rank: Rank, per_host: int) -> Turn:
    if rank.device.type != "cpu":
        return Turn(True, per_host, per_host)
    every = all_ranks(tuple(local_cores()), tuple[int, ...])
    first = rank.number - rank.number % per_host
    num_cores = len(set(chain.from_iterable(every[first : first + per_host])))
    return Turn(rank.number - first < num_cores, min(per_host, num_cores), per_host)


def measure_cluster(rank: Rank) -> Cluster:
    """Called by all running ranks together, on one host or several; every rank gets the same Cluster."""
    per_host = ranks_per_host(rank)
    num_hosts = rank.num_ranks // per_host
    turn = _turn(rank, per_host)
    own = kernels.measure_rates(rank.device) if turn.is_ours else []
    rates = from_first(lambda: tuple(own), tuple[Rate, ...])
    slowest = _slowest([rate.per_second for rate in own] or [inf] * len(rates), rank)
    shared = tuple(
        msgspec.structs.replace(rate, per_second=value * turn.share) for rate, value in zip(rates, slowest, strict=True)
    )
    speeds = _measure_speeds(rank) if turn.is_ours else [inf] * 5
    update, forward_launches, backward_launches, split_launches, halves_launches = (
        speed * turn.share for speed in _slowest(speeds, rank)
    )
    alone = _measure_alone(rank, rates) if rank.device.type == "cpu" and per_host > 1 else None
    collectives = links.measure_collectives(rank) if rank.num_ranks > 1 else ()
    (overlap,) = _slowest([links.measure_overlap(rank) if rank.num_ranks > 1 else 1.0], rank)
    host_link, host_updates = measure_host(rank, per_host)
    disk = measure_disk(cache_folder(), turn.num_measuring, turn.is_ours)
    host_rate, host_updates, disk = _slowest([host_link.bytes_per_second, host_updates, disk], rank)
    queues = rank.device.type == "cpu" and rank.num_ranks > 1
    (negated,) = _slowest([-measure_shard_call(rank) if queues else 0.0], rank)
    return Cluster(
        name="local",
        origin="probe",
        num_hosts=num_hosts,
        devices_per_host=per_host,
        device=Device(
            name=gpu_name() if rank.device.type == "cuda" else cpu_name(),
            kind="cuda" if rank.device.type == "cuda" else "cpu",
            memory_bytes=device_memory_bytes(rank),
            rates=shared,
            launch_seconds=1 / forward_launches,
            backward_launch_seconds=1 / backward_launches,
            split_launch_seconds=1 / split_launches,
            halves_launch_seconds=1 / halves_launches,
            update_elements_per_second=update,
            alone=alone,
            overlap_share=max(0.0, min(1.0, overlap)),
            shard_call_seconds=-negated,
            peak_flops_per_second=max(rate.per_second for rate in shared if rate.kind == "matmul"),
        ),
        collectives=collectives,
        intra_host=links.link_of(collectives if num_hosts == 1 else links.measure_host_link(rank, per_host)),
        inter_host=links.link_of(collectives) if num_hosts > 1 else None,
        host_link=msgspec.structs.replace(host_link, bytes_per_second=host_rate),
        host_updates_per_second=host_updates,
        disk_bytes_per_second=disk or None,
        host_memory_bytes=physical_bytes(),
        notes=(
            f"measured with {rank.num_ranks} ranks at once, torch {torch.__version__}",
            *notes_on(measure_host_links(rank, per_host)),
        ),
    )


def _measure_speeds(rank: Rank) -> list[float]:
    """Updates of parameters, and launches forward, backward, of split ops and of halves of a backward, a second."""
    launches = [*kernels.measure_launches(rank.device), measure_split_launch(rank.device)]
    launches.append(measure_halves_launch(rank.device, launches[0]))
    return [kernels.measure_update(rank.device), *(1 / seconds for seconds in launches)]


def _measure_alone(rank: Rank, together: Sequence[Rate]) -> Alone:
    """The first rank's figures while all others wait. Never below what it reached among them, which noise could make it."""
    dist.barrier()
    return from_first(lambda: _measured_alone(rank, together), Alone)


def _measured_alone(rank: Rank, together: Sequence[Rate]) -> Alone:
    rates = kernels.measure_rates(rank.device)
    forward, backward, *_ = kernels.measure_launches(rank.device)
    return Alone(
        rates=tuple(
            msgspec.structs.replace(rate, per_second=max(rate.per_second, other.per_second))
            for rate, other in zip(rates, together, strict=True)
        ),
        launch_seconds=forward,
        backward_launch_seconds=backward,
        update_elements_per_second=kernels.measure_update(rank.device),
    )


def ranks_per_host(rank: Rank) -> int:
    """The same on every host, or refused."""
    per_host = ranks_here()
    if rank.num_ranks % per_host:
        raise InputError(f"{rank.num_ranks} ranks with {per_host} on this host: start equally many on every host")
    return per_host


def _slowest(values: list[float], rank: Rank) -> list[float]:
    """The least of each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if rank.device.type == "cuda" and dist.get_backend() == "nccl":
        tensor = tensor.to(rank.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return [float(value) for value in tensor]


def device_memory_bytes(rank: Rank) -> int:
    """A GPU's own memory, or an equal share of the host's."""
    if rank.device.type == "cuda":
        return int(torch.cuda.get_device_properties(rank.device).total_memory)
    return physical_bytes() // ranks_per_host(rank)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpu_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
