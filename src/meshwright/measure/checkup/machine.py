"""Devices and the paths between them, memory, disk, limits, clock, ports, and the name of the host."""

from __future__ import annotations

import ipaddress
import os
import resource
import shutil
import socket
import tempfile
import time
from pathlib import Path

import torch

from meshwright.core.units import GIB, MIB, format_bytes
from meshwright.measure.checkup.finding import Finding, ok, problem, warning
from meshwright.measure.probe import cpu_name
from meshwright.runtime.affinity import local_cores
from meshwright.runtime.host_memory import physical_bytes
from meshwright.runtime.rendezvous import LOOPBACK, address_of, listening_store

COPY_BYTES = 1 << 28
LEAST_SHARED_BYTES = 256 * MIB
FEW_DESCRIPTORS, MANY_DESCRIPTORS = 4096, 65536
LEAST_FREE_BYTES, LITTLE_FREE_BYTES = GIB, 10 * GIB
WRITE_BYTES = 32 * MIB
SLOW_WRITE_BYTES_PER_SECOND = 30e6
SLOW_SYNC_SECONDS = 0.5
CLOCK_SECONDS, CLOCK_ERROR_SECONDS = 0.2, 0.05
RELEASED = 1735689600
"""Seconds at the start of 2025: an earlier clock is a wrong one."""
DEFAULT_PORT = 29500
"""Where torchrun's ranks meet if nobody says."""


def check_devices() -> Finding:
    cores = len(local_cores())
    host = f"{cores} cores of {cpu_name()}, {format_bytes(physical_bytes())} of memory"
    if not torch.cuda.is_available():
        return ok("devices", f"no GPU; {host}")
    names = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        names.append(f"GPU {number}: {properties.name}, {format_bytes(free)} of {format_bytes(total)} free")
        if free < total / 2:
            others = "more than half of its memory is in use"
            return warning("devices", f"{names[-1]}: {others}", "see who uses it with nvidia-smi")
        product = torch.ones(64, 64, device=f"cuda:{number}") @ torch.ones(64, 64, device=f"cuda:{number}")
        if float(product.sum()) != 64.0**3:
            return problem("devices", f"{names[-1]}: a matmul gave a wrong result", "take it out of service")
    return ok("devices", "; ".join([*names, host]))


def check_peers() -> Finding:
    """Whether GPUs reach each other's memory directly, and how fast the slowest pair copies."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return ok("peers", f"{count} GPUs: nothing to check")
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    speed, slowest = min((_copy_rate(*pair), pair) for pair in pairs)
    count = len(pairs) - len(apart)
    words = (
        f"{count} of {len(pairs)} pairs of GPUs reach each other directly; slowest: {slowest}, {speed / 1e9:.1f} GB/s"
    )
    if apart:
        fix = (
            "use GPUs of one switch or NVLink for tp; in a virtual machine, ask for peer access; see nvidia-smi topo -m"
        )
        return warning("peers", f"{words}; not {apart[0]}", fix)
    return ok("peers", words)


def _copy_rate(one: int, other: int) -> float:
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{one}")
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{other}")
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize(one)
        torch.cuda.synchronize(other)
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(one)
        torch.cuda.synchronize(other)
        seconds.append(time.perf_counter() - started)
    return COPY_BYTES / min(seconds)


def check_shared_memory(place: Path = Path("/dev/shm")) -> Finding:
    if not place.is_dir():
        return ok("shared memory", f"{place} is not there: this system has another kind")
    free = shutil.disk_usage(place).free
    if free < LEAST_SHARED_BYTES:
        fix = "give the container more (docker run --shm-size 8g), or remove what is left in it"
        return warning("shared memory", f"{format_bytes(free)} free in {place}", fix)
    return ok("shared memory", f"{format_bytes(free)} free in {place}")


def check_descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"at most {soft} for a process"
    if soft == resource.RLIM_INFINITY or soft >= FEW_DESCRIPTORS:
        return ok("open files", found)
    if hard == resource.RLIM_INFINITY or hard > soft:
        most = MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MANY_DESCRIPTORS)
        return warning("open files", found, f"ulimit -n {most}")
    fix = f"have the limit raised, this user may not: nofile {MANY_DESCRIPTORS} in /etc/security/limits.conf, LimitNOFILE= of a"
    return warning("open files", found, f"{fix} service, or docker run --ulimit nofile={MANY_DESCRIPTORS}")


def check_cache(folder: Path) -> Finding:
    """Where measured machines, captured models and compiled kernels are kept from one command to the next."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".meshwright-") as file:
            file.write(b"x")
    except OSError as error:
        fix = (
            "set XDG_CACHE_HOME to a folder that can be written; without one, every command measures and compiles anew"
        )
        return warning("cache", f"{folder} cannot be written: {error.strerror}", fix)
    return ok("cache", f"{folder} can be written")


def check_disk(folder: Path) -> Finding:
    """Where runs are written: room, and the speed of what a checkpoint does."""
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(place).free
    try:
        speed, sync = _write_speed(place)
    except OSError as error:
        return problem(
            "disk", f"{place.absolute()} cannot be written: {error.strerror}", "choose another folder with --out"
        )
    words = f"{format_bytes(free)} free in {place.absolute()}, writes {speed / 1e6:,.0f} MB/s, a sync takes {sync * 1e3:.1f} ms"
    if free < LEAST_FREE_BYTES:
        return problem("disk", words, "make room: a checkpoint needs 12 bytes a parameter")
    if free < LITTLE_FREE_BYTES:
        return warning("disk", words, "make room: a checkpoint needs 12 bytes a parameter")
    if speed < SLOW_WRITE_BYTES_PER_SECOND or sync > SLOW_SYNC_SECONDS:
        return warning("disk", words, "write runs to a faster disk with --out, or save less often")
    return ok("disk", words)


def _write_speed(place: Path) -> tuple[float, float]:
    """Bytes a second that reach the disk, and seconds to make a few bytes safe."""
    block = os.urandom(MIB)
    with tempfile.NamedTemporaryFile(dir=place, prefix=".meshwright-") as file:
        started = time.perf_counter()
        for _ in range(WRITE_BYTES // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        speed = WRITE_BYTES / (time.perf_counter() - started)
        syncs = []
        for _ in range(5):
            file.write(b"x")
            file.flush()
            started = time.perf_counter()
            os.fsync(file.fileno())
            syncs.append(time.perf_counter() - started)
    return speed, sorted(syncs)[2]


def check_clock() -> Finding:
    """The clock on the wall against the one that only goes forward: a clock that is being set shows."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(CLOCK_SECONDS)
    apart = abs((time.time() - wall) - (time.monotonic() - steady))
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if wall < RELEASED:
        return problem("clock", f"it is {now} here", "set the clock (chronyc makestep, or timedatectl set-ntp true)")
    if apart > CLOCK_ERROR_SECONDS:
        return warning(
            "clock",
            f"it jumped by {apart:.3f} s while it was looked at",
            "wait until time is in step, or check ntpd or chronyd",
        )
    return ok("clock", f"{now}, steady to {apart * 1e3:.1f} ms")


def check_ports() -> Finding:
    """A store on loopback, as local runs have; and the port torchrun's ranks take if nobody says."""
    store = listening_store(LOOPBACK, 0)
    store.set("doctor", "here")
    if store.get("doctor") != b"here":
        return problem("ports", "a store on loopback does not answer", "check the firewall: loopback must be open")
    port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
    if "RANK" not in os.environ and not _is_free(port):
        return warning(
            "ports", f"port {port} is in use", "torchrun --standalone or --rdzv-endpoint HOST:PORT takes another"
        )
    return ok(
        "ports", f"a store on {LOOPBACK} answers; port {port} is {'the job’s' if 'RANK' in os.environ else 'free'}"
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def check_name() -> Finding:
    """gloo listens on the address of the host's name: it must be one the other hosts can reach."""
    name = socket.gethostname()
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        known = [one for _, one in socket.if_nameindex()]
        if interface not in known:
            return problem(
                "host name", f"GLOO_SOCKET_IFNAME={interface}, which is not here", f"use one of {', '.join(known)}"
            )
        return ok("host name", f"{name}; gloo uses {interface}")
    try:
        address = address_of(name)
    except ValueError:
        return warning(
            "host name", f"'{name}' has no address", f"add a line for {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        )
    if not ipaddress.ip_address(address).is_loopback:
        return ok("host name", f"{name} is {address}")
    found = f"'{name}' is {address}, where other hosts cannot reach it"
    fix = "set GLOO_SOCKET_IFNAME (launch --interface), or correct /etc/hosts"
    is_one_of_several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    return (
        warning("host name", found, fix) if is_one_of_several else ok("host name", f"{found}; for several hosts {fix}")
    )
