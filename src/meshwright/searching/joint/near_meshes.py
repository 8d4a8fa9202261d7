"""A local search over meshes: before best first in deep models, and after it where it was cut short with a faster plan.

Two meshes are neighbours where a prime factor of one degree has moved to another degree, or where one has a stage more. Good
meshes have good neighbours. So the search starts from plain meshes, takes the best mesh whose neighbours it does not know yet, and
looks at them.

Bounds prove that plans are slow, but they leave out most of the time a pipeline waits, so they say little about which mesh is good.
Here the points of a mesh are ordered by the seconds they are expected to take (Bounds.expected), and the first few are costed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, zip_longest
from math import inf

import msgspec

from meshwright.core.axes import RANK_AXES
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Mesh, Plan
from meshwright.rules.divisors import divisors
from meshwright.searching.joint.best_first import BestFirst
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.joint.short_searches import FEW_OPENED
from meshwright.searching.problem import Problem, narrowed
from meshwright.searching.space import Point, Shape, families, meshes, points, tensor_degrees, turns, worlds

MOST_MESHES = 24
"""How many neighbours are looked at in all."""
MOST_ON_MESH, MOST_TRIED = 2, 5
"""Plans that are costed on one mesh, each of another shape or schedule; and points that are tried, since some do not fit."""
MOST_ON_BEST = 12
"""Cuts that are costed on the best mesh in the end."""
NEAR = 1.1
"""Points that are expected to take longer than the best plan times this are not costed. Neighbours of a mesh where all plans take
longer are not looked at."""

Costed = list[tuple[Plan, Estimate]]
Expected = tuple[float, Point]
"""Seconds that a step of a point is expected to take, and the point."""


class NearMeshes:
    """costed: plans that were costed before."""

    def __init__(self, problem: Problem, drafts: Drafts, costed: Costed) -> None:
        self.problem, self.drafts, self.costed = problem, drafts, costed
        self.seconds: dict[Mesh, float] = {}
        """Mesh → seconds of its best plan or, where none was costed, the seconds that its best point is expected to take."""
        for plan, estimate in costed:
            if estimate.fits:
                self.seconds[plan.mesh] = min(estimate.step_seconds, self.seconds.get(plan.mesh, inf))

    def go_on(self) -> Costed:
        """All plans that were costed, before and here."""
        for mesh in _plain_meshes(self.problem):
            self.seconds[mesh] = min(self._look_at(mesh), self.seconds.get(mesh, inf))
        done: set[Mesh] = set()
        left = MOST_MESHES
        while left > 0:
            here = min((mesh for mesh in self.seconds if mesh not in done), key=self.seconds.__getitem__, default=None)
            if here is None or self.seconds[here] == inf or self.seconds[here] > NEAR * min(self.seconds.values()):
                break
            done.add(here)
            for mesh in _next_to(here):
                if mesh not in self.seconds and left > 0:
                    self.seconds[mesh] = self._look_at(mesh)
                    left -= self.seconds[mesh] < inf  # what the request or the model does not allow costs nothing
        best = min(self.seconds, key=self.seconds.__getitem__, default=None)
        if best is not None and self.seconds[best] < inf:
            self._look_through(best)
        return self.costed

    def _look_through(self, mesh: Mesh) -> None:
        """Best first on one mesh, for a few cuts."""
        narrow = self._narrowed(mesh)
        assert narrow is not None
        found = BestFirst(narrow, self.drafts, known=self.costed, most_costed=MOST_ON_BEST, most_opened=FEW_OPENED)
        found.run()
        self.costed = found.costed

    def _narrowed(self, mesh: Mesh) -> Problem | None:
        """The problem on this mesh; None where the request does not allow it."""
        narrow = narrowed(self.problem, mesh.degrees)
        asked = narrow is not None and self.problem.world in (None, mesh.world)
        return narrow if narrow is not None and asked and mesh in meshes(narrow, mesh.world) else None

    def _look_at(self, mesh: Mesh) -> float:
        narrow = self._narrowed(mesh)
        if narrow is None:
            return inf
        found = BestFirst(narrow, self.drafts, known=self.costed)
        limit = NEAR * found.best_seconds
        expected = _by_turns(sorted(self._expected(narrow, mesh, found, limit), key=lambda one: one[0]))
        if not expected or expected[0][0] > limit:
            return expected[0][0] if expected else inf
        for seconds, point in expected[:MOST_TRIED]:
            if seconds <= NEAR * found.best_seconds and len(found.costed) < len(self.costed) + MOST_ON_MESH:
                found.cost_point(point)
        own = [estimate.step_seconds for _, estimate in found.costed[len(self.costed) :] if estimate.fits]
        self.costed = found.costed
        return min(own, default=inf)

    def _expected(self, problem: Problem, mesh: Mesh, found: BestFirst, limit_seconds: float) -> Iterator[Expected]:
        for family in families(problem, mesh):
            for shape in family:
                if found.work_bound(shape) <= limit_seconds:
                    yield from self._of_shape(problem, shape, limit_seconds)

    def _of_shape(self, problem: Problem, shape: Shape, limit_seconds: float) -> Iterator[Expected]:
        """For each schedule the point that is expected to be fastest with ZeRO 0 to 2, and the one with ZeRO 3."""
        states = [state for state in points(problem, shape) if self._is_near(state, limit_seconds)]
        for schedule, virtual in turns(problem, shape) if states else ():
            here = [replace(state, schedule=schedule, virtual=virtual) for state in states]
            for some in _by_gathers([(self.drafts.expected(point), point) for point in here]):
                fastest = min(some, key=lambda one: one[0], default=None)
                if fastest is not None and fastest[0] < inf:
                    yield fastest

    def _is_near(self, state: Point, limit_seconds: float) -> bool:
        needs = self.drafts.needs(state)
        return needs is not None and needs.seconds <= limit_seconds


def _plain_meshes(problem: Problem) -> Iterator[Mesh]:
    """Meshes on all devices and on one host, without cp and with tp inside a host, for small and large numbers of stages."""
    request = problem.request
    within = divisors(problem.cluster.devices_per_host)
    every_world = worlds(problem)
    for world in dict.fromkeys([*every_world[:1], *(one for one in every_world if one == within[-1])]):
        for tp in reversed(tensor_degrees(problem, world)):
            if request.tp is not None or tp in within:
                every = meshes(problem, world, tp, request.cp or 1)
                by_stages = {mesh.pp: mesh for mesh in every if mesh.ep == (request.ep or 1)}
                few = {pp.bit_length(): pp for pp in sorted(by_stages, reverse=True)}
                yield from (by_stages[pp] for pp in few.values())


def _by_turns(expected: list[Expected]) -> list[Expected]:
    """Points below ZeRO 3 and points with ZeRO 3 in turns, the fastest first: the time of ZeRO 3 is known least."""
    first, second = sorted(_by_gathers(expected), key=lambda kind: kind[0][0] if kind else inf)
    return [one for pair in zip_longest(first, second) for one in pair if one is not None]


def _by_gathers(expected: list[Expected]) -> tuple[list[Expected], list[Expected]]:
    """Points below ZeRO 3, and points with ZeRO 3, which gathers parameters in every microbatch."""
    return [one for one in expected if one[1].zero < 3], [one for one in expected if one[1].zero == 3]


def _next_to(mesh: Mesh) -> Iterator[Mesh]:
    degrees = mesh.degrees
    for giver, taker in permutations(RANK_AXES, 2):
        for part in _primes(degrees[giver]):
            moved = {**degrees, giver: degrees[giver] // part, taker: degrees[taker] * part}
            if moved["dp"] % mesh.ep == 0:
                yield msgspec.structs.replace(mesh, **moved)
    for pp in (mesh.pp - 1, mesh.pp + 1):
        if pp > 0:
            yield msgspec.structs.replace(mesh, pp=pp)
    for part in _primes(mesh.dp):  # fewer devices
        if mesh.dp // part % mesh.ep == 0:
            yield msgspec.structs.replace(mesh, dp=mesh.dp // part)


def _primes(number: int) -> list[int]:
    return [part for part in divisors(number)[1:] if len(divisors(part)) == 2]
