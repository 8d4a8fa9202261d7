"""The host beside a device: how fast the link moves both ways at once, how fast AdamW updates in the host's memory, and how fast
state goes to its disk.

On a CPU the link is a copy within memory: what a run without a throttled stand-in sees. The disk is the one that has the cache of
measurements: state that a plan keeps elsewhere (`offload.folder`) may be faster or slower there.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.core.cluster import Link
from meshwright.core.errors import MeshwrightError
from meshwright.runtime.offload.disk_store import DiskStore
from meshwright.runtime.offload.host import HostMemory
from meshwright.runtime.offload.link import open_link
from meshwright.runtime.offload.pieces import MOMENTS
from meshwright.runtime.offload.rules import AdamRule, State, Task, find_rule
from meshwright.runtime.offload.threads import num_threads
from meshwright.runtime.ranks import Rank

COPY_BYTES = {"cuda": 1 << 28, "cpu": 1 << 25}
UPDATE_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}
"""Large beside every cache."""
DISK_BYTES = 1 << 25
REPEATS = 5


def measure_host(rank: Rank, per_host: int) -> tuple[Link, float]:
    """The link of one device, and the parameters all ranks of a host update in a second; measured by all ranks at once."""
    dist.barrier()
    seconds = _both_ways_seconds(rank.device)
    link = Link(
        bytes_per_second=COPY_BYTES[rank.device.type] / seconds, latency_seconds=_latency(rank.device), origin="probe"
    )
    dist.barrier()
    return link, per_host * UPDATE_ELEMENTS[rank.device.type] / _update_seconds(rank.device, per_host)


def measure_disk(folder: Path, per_host: int, takes_part: bool = True) -> float:
    """Bytes a second that ranks of a host write and commit as runs do, measured by so many at once; 0 where none can be written.
    Infinite for those that take no part."""
    dist.barrier()
    if not takes_part:
        return math.inf
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="probe-", dir=folder) as place:
            return per_host * DISK_BYTES / _commit_seconds(Path(place))
    except (OSError, MeshwrightError):
        return 0.0


def _commit_seconds(folder: Path) -> float:
    store, memory, found = DiskStore(folder, {"state": DISK_BYTES}), torch.zeros(DISK_BYTES, dtype=torch.uint8), []
    try:
        for _ in range(REPEATS):
            memory.random_()  # a file system that compresses would look too fast
            started = time.perf_counter()
            store.write("state", memory)
            store.commit()
            found.append(time.perf_counter() - started)
    finally:
        store.close()
    return sorted(found)[REPEATS // 2]


def _both_ways_seconds(device: torch.device) -> float:
    size = COPY_BYTES[device.type]
    memory, link = HostMemory(2 * size, device, "a probe of the link to the host"), open_link(device)
    away, home = (memory.take(size, torch.uint8) for _ in range(2))
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        arrivals = link.to_host(source, away), link.to_device(home, target)
        for arrival in arrivals:
            arrival.wait_on_host()
        found.append(time.perf_counter() - started)
    link.close()
    memory.close()
    return min(found[1:])


def _latency(device: torch.device) -> float:
    memory, link = HostMemory(4096, device, "a probe of the link to the host"), open_link(device)
    small, there = memory.take(16, torch.uint8), torch.zeros(16, dtype=torch.uint8, device=device)
    found = []
    for _ in range(4 * REPEATS):
        started = time.perf_counter()
        link.to_device(small, there).wait_on_host()
        found.append(time.perf_counter() - started)
    link.close()
    memory.close()
    return min(found)


def _update_seconds(device: torch.device, per_host: int) -> float:
    """Gradients and parameters as the device has them: 16 bits on a GPU."""
    size = UPDATE_ELEMENTS[device.type]
    weight = torch.zeros(size)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(weight)], fused=True)
    gradient = torch.full((size,), 1e-3, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    rule = find_rule(optimizer, torch.float32, num_threads(per_host))
    state: State = {}
    if isinstance(rule, AdamRule):
        state = {"step": 0, **{name: torch.zeros(size) for name in MOMENTS}}
    narrow = gradient if device.type == "cuda" else None
    task = Task(weight, state, gradient, narrow, optimizer.param_groups[0], 1.0)
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        rule.update([task])
        found.append(time.perf_counter() - started)
    rule.close()
    return sorted(found)[REPEATS // 2]
