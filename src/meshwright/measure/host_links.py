"""The link between each two hosts, one pair at a time: the slow one is found, and named.

A collective over all hosts is as fast as its slowest link and does not say which that is. Here the first rank of one host sends to
the first of another, and is answered, while all others wait:

    n bytes there, n bytes back:  t = 2 (hop + n / bandwidth)      hop from the smallest n, bandwidth from the largest
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from meshwright.core.cluster import Link
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.ranks import Rank

SMALL_BYTES = 8
LARGE_BYTES = {"cpu": 1 << 21, "cuda": 1 << 26}
MOST_HOSTS = 8
"""All pairs of so many hosts; of more, each host and the next."""
REPEATS = 3
SLOW = 2.0
"""A link that is so many times slower than the middle one is named."""


@dataclass(frozen=True)
class HostLink:
    one: int
    other: int
    link: Link

    @property
    def words(self) -> str:
        hop = self.link.latency_seconds or 0.0
        return f"host {self.one} to host {self.other}: {self.link.bytes_per_second / 1e6:,.1f} MB/s, {hop * 1e3:.3f} ms"


def measure_host_links(rank: Rank, per_host: int) -> tuple[HostLink, ...]:
    """Called by all ranks; each gets all links. Nothing where there is one host."""
    found = []
    for one, other in pairs_of(rank.num_ranks // per_host):
        dist.barrier()
        mine = _measure(rank, one * per_host, other * per_host)
        (link,) = [seen for seen in all_ranks(mine, Link | None) if seen is not None]
        found.append(HostLink(one, other, link))
    return tuple(found)


def pairs_of(num_hosts: int) -> list[tuple[int, int]]:
    if num_hosts <= MOST_HOSTS:
        return list(combinations(range(num_hosts), 2))
    return [(host, (host + 1) % num_hosts) for host in range(num_hosts)]


def _measure(rank: Rank, one: int, other: int) -> Link | None:
    """The link, on the rank that measures it."""
    if rank.number not in (one, other):
        return None
    large = LARGE_BYTES[rank.device.type]
    small_seconds, large_seconds = (_round_trip(rank, one, other, size) for size in (SMALL_BYTES, large))
    if rank.number == other:
        return None
    hop = small_seconds / 2
    moving = max(large_seconds / 2 - hop, 1e-3 * large_seconds)
    return Link(bytes_per_second=large / moving, latency_seconds=hop, origin="probe")


def _round_trip(rank: Rank, one: int, other: int, num_bytes: int) -> float:
    """The least of some: what disturbs a message only makes it later."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=rank.device)
    seconds = []
    for _ in range(REPEATS + 1):  # the first opens the connection
        started = time.perf_counter()
        if rank.number == one:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, one)
            dist.send(message, one)
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def notes_on(links: tuple[HostLink, ...]) -> tuple[str, ...]:
    """Each link in words; and which of several are far slower than the others."""
    if not links:
        return ()
    usual = median(link.link.bytes_per_second for link in links)
    slow = [link for link in links if SLOW * link.link.bytes_per_second < usual]
    warnings = [
        f"the link of host {link.one} and host {link.other} is {usual / link.link.bytes_per_second:.1f} times slower than usual"
        for link in slow
    ]
    return (*(link.words for link in links), *warnings)
