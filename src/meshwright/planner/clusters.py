"""The cluster that is planned for: a value, a name of the catalogue, a file, or `local`, this machine measured."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from meshwright.core.cluster import Cluster, check_hosts, load_cluster
from meshwright.core.errors import InputError, check_choice, check_number
from meshwright.core.units import format_bytes, parse_bytes

Say = Callable[[str], None]
"""Takes a line about work that takes long."""
LOCAL = "local"


def silent(words: str) -> None:
    """Says nothing."""


def asked_cluster(
    cluster: Cluster | str | os.PathLike[str], hosts: int | None = None, nproc: int | None = None, say: Say = silent
) -> Cluster:
    """hosts: None leaves a file's own number, and one host of a name. What would be without effect is refused."""
    if hosts is not None:
        check_hosts(hosts)
    if isinstance(cluster, Cluster):
        if nproc is not None:
            raise InputError(f"nproc counts ranks of this machine, but a cluster was given: use devices={nproc}")
        return with_hosts(cluster, hosts)
    name = os.fspath(cluster)
    if name == LOCAL and hosts not in (None, 1):
        raise InputError(f"--hosts is {hosts}, but 'local' is this machine alone: name a cluster, or leave --hosts out")
    if name != LOCAL and nproc is not None:
        raise InputError(f"--nproc counts ranks of this machine, but the cluster is '{name}': use --devices {nproc}")
    return with_hosts(find_cluster(name, hosts or 1, nproc, say=say), hosts)


def with_hosts(cluster: Cluster, hosts: int | None) -> Cluster:
    return cluster if hosts in (None, cluster.num_hosts) else msgspec.structs.replace(cluster, num_hosts=hosts)


def find_cluster(
    name: str, hosts: int = 1, nproc: int | None = None, device: str = "auto", backend: str = "auto", say: Say = silent
) -> Cluster:
    """`local` is probed, a path is read, anything else is a name of the catalogue."""
    if name == LOCAL:
        return probed(nproc, device, backend, say=say)
    if name.endswith((".json", ".toml")):
        found = load_cluster(name)
        return found if hosts == 1 else with_hosts(found, check_hosts(hosts))
    return Cluster.named(name, hosts)


def check_device(device: str, backend: str) -> None:
    """Where ranks run, and how they talk to each other."""
    check_choice("--device", device, ("auto", "cpu", "cuda"))
    check_choice("--backend", backend, ("auto", "gloo", "nccl"))


def probed(nproc: int | None, device: str, backend: str, fresh: bool = False, say: Say = silent) -> Cluster:
    """This machine, measured now or before."""
    from meshwright.measure.others import BUSY_SHARE
    from meshwright.measure.probe import default_num_ranks, probe
    from meshwright.runtime.launch import check_num_ranks

    check_device(device, backend)
    num_ranks = nproc if nproc is not None else default_num_ranks(device)  # type: ignore[arg-type]
    check_num_ranks(num_ranks)
    ranks = f"{num_ranks} ranks at once" if num_ranks > 1 else "one rank"

    def say_start() -> None:
        say(f"measuring this machine with {ranks} (about ten seconds, then cached) …")

    cluster = probe(num_ranks, device=device, backend=backend, fresh=fresh, on_start=say_start)  # type: ignore[arg-type]
    if cluster.others_share > BUSY_SHARE:
        say(
            f"other programs took {cluster.others_share:.0%} of the cores while this machine was measured: predictions are "
            "for a busy machine. It is measured again once it is quieter, or by `meshwright probe --fresh`"
        )
    return cluster


def checked_budget(memory: str | int | None, cluster: Cluster) -> int | None:
    """Bytes a device may use. A budget that no device has would let a plan fit that cannot run."""
    budget, has = parse_bytes(memory) if isinstance(memory, str) else memory, cluster.device.memory_bytes
    check_number("--memory", budget)
    if budget is not None and budget > has:
        raise InputError(
            f"--memory {memory} is more than the {format_bytes(has)} that a device of '{cluster.name}' has: leave it out, or "
            "describe the device in a cluster file"
        )
    return budget
