"""The cluster a plan is asked for, as `--cluster`, `--hosts` and `--nproc` say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.cluster import Cluster


def asked_cluster(console: Console, name: str, hosts: int | None, nproc: int | None = None) -> Cluster:
    """hosts: None leaves a file's own number, and one host of a name. What would be without effect is refused."""
    import msgspec

    from meshwright.cli.wiring import find_cluster
    from meshwright.core.cluster import check_hosts
    from meshwright.core.errors import InputError

    if hosts is not None:
        check_hosts(hosts)
    if name == "local" and hosts not in (None, 1):
        raise InputError(f"--hosts is {hosts}, but 'local' is this machine alone: name a cluster, or leave --hosts out")
    if name != "local" and nproc is not None:
        raise InputError(f"--nproc counts ranks of this machine, but the cluster is '{name}': use --devices {nproc}")
    found = find_cluster(console, name, hosts or 1, nproc)
    return found if hosts in (None, found.num_hosts) else msgspec.structs.replace(found, num_hosts=hosts)


def check_budget(memory: str | None, cluster: Cluster) -> None:
    """A budget that no device has would let a plan fit that cannot run."""
    from meshwright.cli.wiring import budget_of
    from meshwright.core.errors import InputError
    from meshwright.core.units import format_bytes

    budget, has = budget_of(memory), cluster.device.memory_bytes
    if budget is not None and budget > has:
        raise InputError(
            f"--memory {memory} is more than the {format_bytes(has)} that a device of '{cluster.name}' has: leave it out, or "
            "describe the device in a cluster file"
        )
