"""Overlap of communication with compute, played on two streams.

compute runs block after block; the link carries one collective at a time, in the order they are issued.

    forward     gather(i) starts when the link is free and block i-2 is done (two blocks' parameters fit);
                block i starts when its parameters are there                                       -> play_forward
    backward    the gather of the next block and the reduction of the last share the link; a block starts when its
                parameters are there, a reduction when its gradients are                           -> play_backward
    exposed     end of the last of both - Σ compute

Compute that overlaps with communication is slowed by `slowdown` of the hidden time.                -> exposed_seconds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lane:
    """One block in a phase: seconds of its compute, of the gather before it and of the reduction after it."""

    compute: float
    gather: float = 0.0
    reduce: float = 0.0


def play_forward(lanes: Sequence[Lane]) -> float:
    """Seconds until the last block is done."""
    link = 0.0
    ends = [0.0, 0.0]
    for lane in lanes:
        if lane.gather:
            link = max(link, ends[-2]) + lane.gather
        ends.append(max(ends[-1], link if lane.gather else 0.0) + lane.compute)
    return ends[-1]


def play_backward(lanes: Sequence[Lane]) -> float:
    """Seconds until the last block and the last reduction are done."""
    link = clock = 0.0
    arrived = 0.0
    if lanes and lanes[0].gather:
        link = arrived = lanes[0].gather
    for place, lane in enumerate(lanes):
        start = max(clock, arrived)
        following = lanes[place + 1] if place + 1 < len(lanes) else None
        if following is not None and following.gather:
            link = max(link, start) + following.gather
            arrived = link
        clock = start + lane.compute
        if lane.reduce:
            link = max(link, clock) + lane.reduce
    return max(clock, link)


def exposed_seconds(lanes: Sequence[Lane], played: float, slowdown: float) -> float:
    """Seconds that communication adds to compute: its exposed part, and the slowdown of compute by its hidden part."""
    compute = sum(lane.compute for lane in lanes)
    communication = sum(lane.gather + lane.reduce for lane in lanes)
    exposed = max(0.0, played - compute)
    return exposed + slowdown * max(0.0, communication - exposed)
