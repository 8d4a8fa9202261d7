"""Dynamic programming over a layer profile: stages of consecutive units, each on several replicas, with the slowest as fast as
possible.

From a profile of the n units (methods/loads.py), for w workers of cp · tp devices and m' microbatches a step in all:

    stage(i, j, r)   = m'/r · Σ_{i≤b<j} seconds_b + all-reduce(Σ_{i≤b<j} weight bytes, r replicas)     -> Profile.stage
    link(i, r)       = m'/r · 2 · send_{i-1}          activations in and gradients back                -> Profile.link
    A(j, w)          = min over i < j, r ≤ w of  max( A(i, w - r), link(i, r), stage(i, j, r) )         -> free_replication
    A(0, 0)          = 0

The recursion is PipeDream's (Harlap et al. 2018, 1806.03377), in seconds of a synchronous step: replicas all-reduce gradients once
a step, not for every microbatch. r neighbouring groups communicate inside a host as long as r · cp · tp devices are on one host,
and between hosts otherwise, so hosts need no level of their own.

**A Plan has one dp for all stages**, so only solutions with r = dp everywhere are plans. For each divisor dp of the workers, the
same recursion with fixed r gives the best cut into p = w / dp stages:                                        -> uniform_replication

    U(j, s) = min over i < j of  max( U(i, s - 1), link(i, dp), stage(i, j, dp) )

`replication_loss` says how much slower the slowest stage is because of that. Neither recursion knows memory or the bubble: more and
more memory is saved until the cut fits, and the expected step is (1 + (p-1) dp / m') times the slowest stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.searching.methods.builder import Builder
from meshwright.searching.methods.frames import Frame, frames, layouts, shortlist
from meshwright.searching.methods.loads import Loads, Unit, loads_of, reduce_seconds
from meshwright.searching.problem import Outcome, Problem
from meshwright.searching.space import Point, Shape


@dataclass(frozen=True)
class Profile:
    """Seconds of stages and links in one step, for any stage and any number of replicas."""

    units: tuple[Unit, ...]
    total_microbatches: int
    """Microbatches of a step, of all replicas together."""
    reduce: Callable[[float, int], float]
    """Bytes and replicas → seconds."""

    def stage(self, first: int, end: int, replicas: int) -> float:
        """Seconds of a stage with units first … end-1 on so many replicas."""
        seconds = self._seconds[end] - self._seconds[first]
        weights = self._weights[end] - self._weights[first]
        return self.total_microbatches / replicas * seconds + self.reduce(weights, replicas)

    def link(self, first: int, replicas: int) -> float:
        """Seconds of the link into the stage that begins with this unit."""
        return self.total_microbatches / replicas * 2 * self.units[first - 1].send_seconds if first else 0.0

    @cached_property
    def _seconds(self) -> list[float]:
        return list(accumulate((unit.seconds for unit in self.units), initial=0.0))

    @cached_property
    def _weights(self) -> list[float]:
        return list(accumulate((unit.weight_bytes for unit in self.units), initial=0.0))


def profile(problem: Problem) -> Outcome:
    builder = Builder(problem)

    def cut(loads: Loads, point: Point) -> tuple[float, tuple[int, ...]] | None:
        """The step that the best cut is expected to take, and this cut; None where it does not fit."""
        shape = point.shape
        slowest, counts = uniform_replication(profile_of(loads, shape, problem.cluster), shape.dp, shape.pp)
        if not loads.fit(counts, shape.num_microbatches):
            return None
        return slowest * (1 + (shape.pp - 1) / shape.num_microbatches), counts

    return shortlist(builder, [found for frame in frames(problem, builder) for found in layouts(builder, frame, cut)])


def profile_of(loads: Loads, shape: Shape, cluster: Cluster) -> Profile:
    def reduce(weight_bytes: float, replicas: int) -> float:
        return reduce_seconds(weight_bytes, msgspec.structs.replace(shape.mesh, dp=replicas, ep=1), cluster)

    return Profile(loads.units, shape.num_microbatches * shape.dp, reduce)


def uniform_replication(profile: Profile, replicas: int, num_stages: int) -> tuple[float, tuple[int, ...]]:
    """Seconds of the slowest stage, and the units of each stage, with the same number of replicas for every stage."""
    count = len(profile.units)
    best = [[inf] * (count + 1) for _ in range(num_stages + 1)]
    came = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(stage, count + 1):
            for first in range(end - 1, stage - 2, -1):
                own = profile.stage(first, end, replicas)
                if own >= best[stage][end]:
                    break  # a longer stage is slower still
                slowest = max(best[stage - 1][first], profile.link(first, replicas), own)
                if slowest < best[stage][end]:
                    best[stage][end], came[stage][end] = slowest, first
    return best[num_stages][count], _counts(came, num_stages, count)


def _counts(came: list[list[int]], num_stages: int, count: int) -> tuple[int, ...]:
    found, end = [], count
    for stage in range(num_stages, 0, -1):
        found.append(end - came[stage][end])
        end = came[stage][end]
    return tuple(reversed(found))


def free_replication(profile: Profile, num_workers: int) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Seconds of the slowest stage where each has its own number of replicas; and the units and replicas of every stage.

    All workers are used or some are left idle, whichever is faster.
    """
    count = len(profile.units)
    best: list[list[float]] = [[0.0] * (num_workers + 1)] + [[inf] * (num_workers + 1) for _ in range(count)]
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for end in range(1, count + 1):
        for replicas in range(1, num_workers + 1):
            for first in range(end):
                own = max(profile.link(first, replicas), profile.stage(first, end, replicas))
                for workers in range(replicas, num_workers + 1):
                    before = best[first][workers - replicas]
                    slowest = before if before > own else own
                    if slowest < best[end][workers]:
                        best[end][workers] = slowest
                        came[end, workers] = (first, replicas)
    stages, end, workers = [], count, num_workers
    while end:
        first, replicas = came[end, workers]
        stages.append((end - first, replicas))
        end, workers = first, workers - replicas
    return best[count][num_workers], tuple(reversed(stages))


def replication_loss(problem: Problem) -> float:
    """How much longer the slowest stage takes because all stages have the same replication: 0.1 is a tenth.

    The best uniform replication over all tp against the best free one, with the smallest microbatch and nothing saved.
    """
    builder = Builder(problem)
    by_tp: dict[int, list[Frame]] = {}
    for frame in frames(problem, builder):
        if frame.mesh.ep == (problem.request.ep or 1):
            by_tp.setdefault(frame.mesh.tp, []).append(frame)
    uniform = free = inf
    for alike in by_tp.values():
        for frame in alike:
            seconds, _ = uniform_replication(_plain_profile(builder, frame), frame.mesh.dp, frame.mesh.pp)
            uniform = min(uniform, seconds)
        longest = max(alike, key=lambda frame: frame.mesh.pp)
        seconds, _ = free_replication(_plain_profile(builder, longest), longest.mesh.pp * longest.mesh.dp)
        free = min(free, seconds)
    return uniform / free - 1


def _plain_profile(builder: Builder, frame: Frame) -> Profile:
    return profile_of(loads_of(builder, frame.plain), frame.plain.shape, builder.problem.cluster)
