"""What only several ranks can see: whether a collective is right, how fast the links are, and whether clocks agree.

Clocks, as network time has it: rank 0 asks at t0 and hears at t3, the other reads its clock at t1; then

    offset = t1 - (t0 + t3) / 2,  off by at most (t3 - t0) / 2            of several, the one with the shortest way
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.core.units import format_seconds
from meshwright.measure.checkup.finding import Finding, ok, problem, warning
from meshwright.measure.host_links import measure_host_links
from meshwright.measure.probe import ranks_per_host
from meshwright.measure.stopwatch import typical_seconds
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.ranks import Rank, joined

LARGE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 27}
ASKED = 8
SKEW_SECONDS = 0.5
"""Files of two hosts would be dated in the wrong order."""


def check_rank(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank that the doctor starts runs."""
    with joined(payload["device"], payload["backend"]) as rank:
        return [msgspec.to_builtins(finding) for finding in check_between(rank)]


def check_between(rank: Rank) -> list[Finding]:
    """Called by all ranks together; the same on each."""
    return [check_sum(rank), *check_host_links(rank), check_skew(rank)]


def check_sum(rank: Rank) -> Finding:
    """An all-reduce of known numbers, then its speed."""
    numbers = torch.full((1024,), float(rank.number + 1), device=rank.device)
    dist.all_reduce(numbers)
    wrong = [
        number
        for number, value in enumerate(all_ranks(float(numbers.mean()), float))
        if value != sum(range(rank.num_ranks + 1))
    ]
    where = f"between {rank.num_ranks} ranks over {dist.get_backend()}"
    if wrong:
        return problem(
            "links", f"all-reduce {where}: a wrong sum on ranks {wrong}", "run without the hosts of these ranks"
        )
    size = LARGE_BYTES[rank.device.type]
    tensors = {count: torch.zeros(count // 4, device=rank.device) for count in (8, size)}
    small, large = (
        max(all_ranks(typical_seconds(lambda t=tensor: dist.all_reduce(t), rank.device, together=True), float))  # type: ignore[misc]
        for tensor in tensors.values()
    )
    return ok(
        "links",
        f"all-reduce {where}: right, {format_seconds(small)} at the least, {size / large / 1e6:,.0f} MB/s at {size >> 20} MiB",
    )


def check_host_links(rank: Rank) -> list[Finding]:
    """Between each two hosts; nothing on one."""
    return [ok("link between hosts", link.words) for link in measure_host_links(rank, ranks_per_host(rank))]


def check_skew(rank: Rank) -> Finding:
    found = [_offset(rank, other) for other in range(1, rank.num_ranks)]
    offset, other = max(((abs(value), number) for number, value in enumerate(found, 1)), default=(0.0, 0))
    words = f"clocks of {rank.num_ranks} ranks agree to {offset * 1e3:.1f} ms"
    if offset > SKEW_SECONDS:
        fix = "keep the hosts' clocks in step with chrony or ntp: logs and files would be dated in the wrong order"
        return warning("clock skew", f"the clock of rank {other} is {offset:.2f} s off that of rank 0", fix)
    return ok("clock skew", words)


def _offset(rank: Rank, other: int) -> float:
    """Seconds the other's clock is ahead of the first's; the same on all ranks."""
    best = torch.tensor([float("inf"), 0.0], dtype=torch.float64)
    device = rank.device if dist.get_backend() == "nccl" else torch.device("cpu")
    clock = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(ASKED):
        if rank.number == 0:
            asked = time.time()
            dist.send(clock, other)
            dist.recv(clock, other)
            heard = time.time()
            if heard - asked < float(best[0]):
                best = torch.tensor([heard - asked, float(clock) - (asked + heard) / 2], dtype=torch.float64)
        elif rank.number == other:
            dist.recv(clock, 0)
            clock.fill_(time.time())
            dist.send(clock, 0)
    shared = best.to(device)
    dist.broadcast(shared, 0)
    return float(shared[1])
