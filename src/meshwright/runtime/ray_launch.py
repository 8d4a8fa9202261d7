"""Ranks on the hosts of a Ray cluster: a placement group with a bundle a host, an actor in each, which holds that host's ranks.

The ranks are processes of `meshwright.runtime.rank`, with the environment torchrun would give them; the store they meet at is held
by the first host's actor and listens on that host's address. Ray places and watches; it carries no tensor.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import InputError, RunError
from meshwright.runtime.host_ranks import EndedRank, Ending, HostRanks, Look
from meshwright.runtime.launch import Interrupted, describe_failure
from meshwright.runtime.local_ranks import SHUTDOWN_SECONDS
from meshwright.runtime.messages.seal import KEY, new_key
from meshwright.runtime.rendezvous import INTERFACES, LOOPBACK, local_only

LOOK_SECONDS = 0.2
GRACE_SECONDS = 2.0
"""After the first rank failed: others that fail of the same cause leave their own words."""
ANSWER_SECONDS = 10.0
PLACEMENT_SECONDS = 5.0
"""Between two words about waiting for room."""


@dataclass(frozen=True)
class RayJob:
    function: str
    """`package.module:function`, called with the payload on every rank."""
    payload: dict[str, Any]
    num_hosts: int
    ranks_per_host: int
    gpus_per_host: int = 0
    interface: str | None = None

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def bundle(self) -> dict[str, float]:
        """What a host must have free."""
        needed: dict[str, float] = {"CPU": self.ranks_per_host}
        return {**needed, "GPU": self.gpus_per_host} if self.gpus_per_host else needed


def run_on_cluster(job: RayJob, address: str | None) -> None:
    """Until all ranks have ended well; a RunError in words where one has not."""
    ray = import_ray()
    with (
        connected(ray, address),
        placed(ray, job) as hosts,
        tempfile.TemporaryDirectory(prefix="meshwright-") as folder,
    ):
        start_ranks(ray, job, hosts)
        try:
            follow(ray, job, hosts, Path(folder))
        except KeyboardInterrupt:
            end_in_order(ray, job, hosts)
            raise Interrupted(None) from None


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed here: pip install 'meshwright[ray]'") from None
    return ray


@contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    """To the cluster that is named or already runs here; else to one that is made for this run and only this machine can reach."""
    if address is not None:
        check_answers(address)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address or os.environ.get("RAY_ADDRESS") or "auto", **quiet)
    except ConnectionError as error:
        if address is not None:
            raise InputError(
                f"--address {address}: no Ray cluster is there ({error}): start one with `ray start --head`"
            ) from None
        start_local(ray, quiet)
    try:
        yield
    finally:
        ray.shutdown()


def start_local(ray: Any, quiet: dict[str, Any]) -> None:
    try:
        ray.init(_node_ip_address=LOOPBACK, include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises no kind of its own here
        raise RunError(
            f"Ray could not start a cluster on this machine: {error} Start one with `ray start --head`, or try again"
        ) from None


def check_answers(address: str) -> None:
    """Ray itself would try for minutes. Names without a port, like `auto`, are Ray's to find."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"--address {address}: no Ray cluster answers there ({error.strerror or error}): start one with `ray start --head`"
        ) from None


@contextmanager
def placed(ray: Any, job: RayJob) -> Iterator[list[Any]]:
    """One actor a host, where each host of the job is a host of the cluster of its own."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    check_room(job, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    group = placement_group([job.bundle] * job.num_hosts, strategy="STRICT_SPREAD")
    while not group.wait(PLACEMENT_SECONDS):
        print(f"waiting until {job.num_hosts} hosts have {_words(job.bundle)} free …", file=sys.stderr, flush=True)
    path = os.environ.get("PYTHONPATH")
    variables = {"env_vars": {"PYTHONPATH": path}} if path else {}
    kind = ray.remote(RayHost)
    try:
        yield [
            kind.options(
                num_cpus=job.ranks_per_host,
                num_gpus=job.gpus_per_host,
                runtime_env=variables,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            ).remote()
            for number in range(job.num_hosts)
        ]
    finally:
        remove_placement_group(group)


def check_room(job: RayJob, hosts: list[dict[str, float]]) -> None:
    """What the cluster could never hold is refused; what it cannot hold now is waited for."""
    fit = [have for have in hosts if all(have.get(name, 0) >= count for name, count in job.bundle.items())]
    if len(fit) < job.num_hosts:
        known = "; ".join(_words({name: have.get(name, 0) for name in ("CPU", "GPU")}) for have in hosts)
        raise InputError(
            f"{job.num_hosts} hosts with {_words(job.bundle)} are needed, and the Ray cluster has {len(fit)} of them (its hosts: "
            f"{known}): use fewer --hosts or --nproc, or add hosts with `ray start --address …`"
        )


def _words(resources: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in resources.items() if count)


class RayHost(HostRanks):
    """The ranks of one host, in an actor."""

    def address(self) -> str:
        """As the other hosts of the cluster know this one."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())


def start_ranks(ray: Any, job: RayJob, hosts: list[Any]) -> None:
    address = ray.get(hosts[0].address.remote())
    port = ray.get(hosts[0].hold_store.remote(address))
    shared = {
        "WORLD_SIZE": job.num_ranks, "LOCAL_WORLD_SIZE": job.ranks_per_host, "GROUP_WORLD_SIZE": job.num_hosts,
        "MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "ray", KEY: new_key(), **_interfaces(job),
    }  # fmt: skip
    environments: list[dict[int, dict[str, str]]] = [{} for _ in hosts]
    for number in range(job.num_ranks):
        host, local = divmod(number, job.ranks_per_host)
        own = {**shared, "RANK": number, "LOCAL_RANK": local, "GROUP_RANK": host}
        environments[host][number] = {name: str(value) for name, value in own.items()}
    ray.get([host.start.remote(job.function, job.payload, own) for host, own in zip(hosts, environments, strict=True)])


def _interfaces(job: RayJob) -> dict[str, str]:
    """Ranks of one host listen on loopback; those of several where they are told to, or as their backends choose."""
    if job.interface is not None:
        return dict.fromkeys(INTERFACES, job.interface)
    return local_only() if job.num_hosts == 1 else {}


def follow(ray: Any, job: RayJob, hosts: list[Any], folder: Path) -> None:
    """Pass on what ranks print until all have ended; stop the others once one has failed."""
    endings: dict[int, Ending] = {}
    while len(endings) < job.num_ranks and not _failed(endings):
        time.sleep(LOOK_SECONDS)
        endings = look_at(ray, job, hosts)
    if _failed(endings):
        time.sleep(GRACE_SECONDS)
        endings = look_at(ray, job, hosts)
        ray.get([host.stop.remote(signal.SIGKILL) for host in hosts])
        raise describe_failure(_as_failures(_failed(endings), folder), job.num_ranks)


def look_at(ray: Any, job: RayJob, hosts: list[Any]) -> dict[int, Ending]:
    """All hosts once; what their ranks printed goes where ours goes."""
    endings: dict[int, Ending] = {}
    waiting = [host.look.remote() for host in hosts]
    for number, answer in enumerate(waiting):
        try:
            look: Look = ray.get(answer)
        except ray.exceptions.RayActorError as error:
            first = number * job.ranks_per_host
            last = first + job.ranks_per_host - 1
            raise RunError(
                f"host {number} of {job.num_hosts} (ranks {first} to {last}) was lost: {error}. All ranks were stopped; "
                "--resume goes on from the newest checkpoint"
            ) from None
        endings |= look.endings
        for stream, line in look.lines:
            print(line, end="", file=sys.stdout if stream == 1 else sys.stderr, flush=True)
    return endings


def end_in_order(ray: Any, job: RayJob, hosts: list[Any]) -> None:
    """After Ctrl-C: ranks save a checkpoint and end within two steps."""
    ray.get([host.stop.remote(signal.SIGTERM) for host in hosts])
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while time.monotonic() < deadline and len(look_at(ray, job, hosts)) < job.num_ranks:
        time.sleep(LOOK_SECONDS)


def _failed(endings: dict[int, Ending]) -> dict[int, Ending]:
    return {rank: ending for rank, ending in endings.items() if ending.exitcode}


def _as_failures(endings: dict[int, Ending], folder: Path) -> dict[int, EndedRank]:
    """With the words of ranks on other hosts in files here."""
    found = {}
    for rank, ending in endings.items():
        file = folder / f"error-{rank}.json"
        if ending.report:
            file.write_text(ending.report)
        found[rank] = EndedRank(ending.exitcode, ending.pid, str(file), ending.timestamp)
    return found
