"""Two hosts on one machine: network namespaces joined by a veth pair, the link held to a rate by tc's token bucket.

    with two_hosts(bits_per_second=1e9) as hosts:
        result = hosts.launch("package.module:function", payload, ranks_per_host=1)     # what rank 0 returned
        process = hosts.start(1, ["python", "-m", "something"])                          # any command, on host 1

Each host has an equal share of this machine's cores, an address of its own, and no way out but the link to the other. They
share the file system, the memory and the name of the machine. What is started on them ends with the block. A namespace is
named after the process that made it, so that the next run removes what a killed one left.

Needs Linux, iproute2 (`ip`, `tc`) and the right to make namespaces (root): `why_not` says in words what is missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from meshwright.core.errors import InputError
from meshwright.runtime.affinity import cores_of
from meshwright.runtime.host_ranks import EndedRank
from meshwright.runtime.launch import describe_failure
from meshwright.runtime.rendezvous import BACKEND

NUM_HOSTS = 2
INTERFACE = "link0"
NAME = re.compile(r"meshwright-(\d+)-\d+")
"""Namespaces of ours, with the process that made them."""
PORT = 29500
"""Nothing else listens in a namespace that was just made."""
PACKET_BYTES, BURST_BYTES = 16 * 1024, 32 * 1024
"""The largest packet the kernel hands to a limited link, and what passes at once after a pause. A bucket has to hold a packet or
two, and everything in it is free: with a usual packet of 64 KiB a message as large would take no time on a slow link."""
QUEUE = "200ms"
"""How long a packet may wait for its turn; past that it is dropped, and TCP slows down more than the rate asks for."""
CONFIGURATION = Path("/etc/netns")
"""What lies here in a folder of a namespace's name, `ip netns exec` lays over /etc."""
GRACE_SECONDS = 5.0
WATCH_SECONDS = 0.05


@dataclass(frozen=True)
class Host:
    name: str
    """Of its namespace."""
    address: str
    cores: tuple[int, ...]


Spawn = Callable[[Host, Sequence[str], Mapping[str, str], IO[bytes] | None], Any]
"""Start a command on a host, with this environment, output into a file or where ours goes. Returns a Popen, or what is like one."""


def spawned(
    host: Host, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, host.cores)  # which the process inherits
    try:
        return subprocess.Popen(
            ["ip", "netns", "exec", host.name, *command], env=environment, stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )  # fmt: skip
    finally:
        os.sched_setaffinity(0, cores)


@dataclass
class Hosts:
    """Hosts that are up. Made by `two_hosts`."""

    hosts: tuple[Host, ...]
    spawn: Spawn = spawned
    processes: list[Any] = field(default_factory=list)
    num_meetings: int = 0

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> Any:
        """A process on one host, on its cores; output goes where ours goes, or into a file."""
        own = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
        process = self.spawn(self.hosts[host], command, {**os.environ, **own, **(environment or {})}, output)
        self.processes.append(process)
        return process

    def torchrun(self, arguments: Sequence[str], ranks_per_host: int = 1, output: IO[bytes] | None = None) -> list[Any]:
        """`meshwright ARGUMENTS` on every rank of every host, as `meshwright launch` starts it: one process a host."""
        self.num_meetings += 1
        command = [
            sys.executable, "-m", "meshwright.runtime.torchrun", f"--nnodes={len(self.hosts)}",
            f"--nproc-per-node={ranks_per_host}", f"--rdzv-backend={BACKEND}", f"--rdzv-id={self.num_meetings}",
            f"--rdzv-endpoint={self.hosts[0].address}:{PORT + self.num_meetings}", "-m", "meshwright", *arguments,
        ]  # fmt: skip
        return [self.start(number, command, output=output) for number in range(len(self.hosts))]

    def cut(self) -> None:
        """Take the link down: what is sent is lost, and nobody is told."""
        call("ip", "-n", self.hosts[-1].name, "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        call("ip", "-n", self.hosts[-1].name, "link", "set", INTERFACE, "up")

    def launch(self, function: str, payload: dict[str, Any], ranks_per_host: int = 1) -> Any:
        """Run `package.module:function` with the payload on every rank; returns what rank 0 returned."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            payload_file, result_file = Path(folder, "payload.json"), Path(folder, "result.json")
            payload_file.write_text(json.dumps(payload))
            command = [sys.executable, "-m", "meshwright.runtime.rank", function, str(payload_file), str(result_file)]
            ranks = [
                self._start_rank(number, ranks_per_host, command, Path(folder, f"error-{number}.json"))
                for number in range(ranks_per_host * len(self.hosts))
            ]
            self._wait(ranks, Path(folder))
            return json.loads(result_file.read_text()) if result_file.exists() else None

    def _start_rank(self, number: int, ranks_per_host: int, command: list[str], error_file: Path) -> Any:
        """The environment is torchrun's."""
        host, local = divmod(number, ranks_per_host)
        environment = {
            "RANK": number, "WORLD_SIZE": ranks_per_host * len(self.hosts), "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": ranks_per_host, "GROUP_RANK": host, "GROUP_WORLD_SIZE": len(self.hosts),
            "MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": PORT, "TORCHELASTIC_ERROR_FILE": error_file,
        }  # fmt: skip
        return self.start(host, command, {name: str(value) for name, value in environment.items()})

    def _wait(self, ranks: list[Any], folder: Path) -> None:
        """Until all have ended well, or one has not: then the others are ended too."""
        codes: list[int | None] = [None] * len(ranks)
        while None in codes and not any(codes):
            time.sleep(WATCH_SECONDS)
            codes = [process.poll() for process in ranks]
        if any(codes):
            time.sleep(WATCH_SECONDS)  # those that failed of the same cause leave their own words
            codes = [process.poll() for process in ranks]
            end(ranks)
            failures = {
                number: EndedRank(code, ranks[number].pid, str(folder / f"error-{number}.json"))
                for number, code in enumerate(codes)
                if code
            }
            raise describe_failure(failures, len(ranks))


@contextmanager
def two_hosts(bits_per_second: float | None = None, spawn: Spawn = spawned) -> Iterator[Hosts]:
    """Two hosts joined by a link of so many bits per second each way; without a figure, as fast as the machine is. spawn: how
    processes are started on them."""
    reason = why_not()
    if reason:
        raise InputError(reason)
    remove_leftovers()
    names = [f"meshwright-{os.getpid()}-{number}" for number in range(NUM_HOSTS)]
    hosts = Hosts(
        tuple(
            Host(name, f"10.77.0.{number + 1}", tuple(cores_of(number, NUM_HOSTS))) for number, name in enumerate(names)
        ),
        spawn,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _leave)
    try:
        connect(hosts.hosts, bits_per_second)
        yield hosts
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # a second signal must not stop the cleaning up
        end(hosts.processes)
        for name in names:
            remove(name)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """A polite end is one with cleaning up."""
    raise SystemExit(128 + number)


def connect(hosts: tuple[Host, ...], bits_per_second: float | None) -> None:
    for host in hosts:
        call("ip", "netns", "add", host.name)
        name_hosts(host, hosts)
    one, other = hosts
    call("ip", "link", "add", INTERFACE, "netns", one.name, "type", "veth", "peer", INTERFACE, "netns", other.name)
    for host in hosts:
        call("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            call("ip", "-n", host.name, "link", "set", interface, "up")
        if bits_per_second is not None:
            limit(host, bits_per_second)


def name_hosts(host: Host, hosts: tuple[Host, ...]) -> None:
    """They know each other as host0 and host1. Without names, and with a name server out of reach, each connection would wait
    many seconds for the other's name."""
    folder = CONFIGURATION / host.name
    folder.mkdir(parents=True, exist_ok=True)
    forms = ("", "::ffff:")  # as itself, and as torch's store asks for it
    names = [f"{form}{other.address} host{number}" for number, other in enumerate(hosts) for form in forms]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    (folder / "resolv.conf").write_text("")


def limit(host: Host, bits_per_second: float) -> None:
    """What leaves a host."""
    rate = f"{round(bits_per_second)}bit"
    bucket = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", QUEUE]
    call("ip", "-n", host.name, "link", "set", INTERFACE, "gso_max_size", str(PACKET_BYTES))
    call("tc", "-n", host.name, "qdisc", "add", "dev", INTERFACE, "root", *bucket)


def why_not() -> str:
    """What keeps two hosts from being made here, and what to do; empty where nothing does."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"two local hosts need iproute2, and {', '.join(missing)} is not here: install it (apt install iproute2)"
    name = f"meshwright-{os.getpid()}-{NUM_HOSTS}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"two local hosts need network namespaces, and this process may not make one ({tried.stderr.strip()}): run as root"
    remove(name)
    return ""


def remove_leftovers() -> None:
    """Namespaces of runs that are no more, and what still runs in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    for name in listed:
        match = NAME.fullmatch(name)
        if match and not Path("/proc", match[1]).exists():
            remove(name)


def remove(name: str) -> None:
    """A namespace, its end of the link and its processes; nothing where there is none."""
    shutil.rmtree(CONFIGURATION / name, ignore_errors=True)
    if not Path("/run/netns", name).exists():
        return
    for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has just ended
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def end(processes: list[Any]) -> None:
    """In good order, or after a while outright."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"`{' '.join(command)}` failed ({done.stderr.strip()}): two local hosts cannot be made here")
