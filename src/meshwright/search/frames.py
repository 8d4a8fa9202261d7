"""The settings around a placement, for the searches that decide only where blocks lie.

They were made for pipelines of one stage a device; a plan needs more. A *frame* is what they are given: a mesh of equal
groups of dp · cp · tp devices, one for each stage, on as many devices as there are; and what is tried with every cut:

    microbatches   powers of two that divide a dp rank's samples, at least as many microbatches as stages where that goes
    rungs          ways to save memory, the plainest first; a method stops at the first that fits        -> RUNGS

Sequence parallel is on where it is legal; experts lie over no ranks, or over as many as they can. What the request fixes has
that value alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from meshwright.core.errors import PlanError
from meshwright.core.plan import MULTI_STAGE_SCHEDULES, Mesh, Recompute, ZeroStage
from meshwright.core.request import recompute_rules
from meshwright.search.builder import Builder, Point
from meshwright.search.exhaustive import has_attention, meshes, no_plan
from meshwright.search.problem import Problem

LARGEST_MICROBATCH = 32
RUNGS: tuple[tuple[ZeroStage, str], ...] = ((0, "none"), (1, "none"), (1, "selective"), (1, "full"), (3, "full"))


@dataclass(frozen=True)
class Rung:
    """One way to save memory."""

    zero: ZeroStage
    rules: tuple[Recompute, ...]


@dataclass(frozen=True)
class Frame:
    """A mesh and what is tried on it."""

    plain: Point
    """With the smallest microbatch and no ZeRO."""
    microbatches: tuple[int, ...]
    rungs: tuple[Rung, ...]
    hybrid: int | None = None

    @property
    def mesh(self) -> Mesh:
        return self.plain.mesh

    def point(self, microbatch: int, rung: Rung) -> Point:
        return Point(
            mesh=self.mesh,
            microbatch=microbatch,
            sequence_parallel=self.plain.sequence_parallel,
            zero=rung.zero,
            hybrid=self.hybrid if rung.zero else None,
            schedule=self.plain.schedule,
            offload=self.plain.offload,
        )


def frames(problem: Problem, builder: Builder) -> list[Frame]:
    """Those on the most devices that any frame can use."""
    _check_one_stage(problem)
    found: dict[int, list[Frame]] = {}
    for mesh in meshes(problem):
        if _is_worth_it(problem, mesh):
            found.setdefault(mesh.world, []).append(_frame(problem, builder, mesh))
    for world in sorted(found, reverse=True):
        legal = [frame for frame in found[world] if frame.microbatches and frame.rungs]
        if legal:
            return legal
    raise no_plan(problem)


def _check_one_stage(problem: Problem) -> None:
    request = problem.request
    if request.schedule in MULTI_STAGE_SCHEDULES or (request.virtual or 1) > 1:
        raise PlanError(
            "this search lays one stage on each pp coordinate: leave --schedule and --virtual out, give gpipe, 1f1b or zb, "
            "or use another --search"
        )


def _is_worth_it(problem: Problem, mesh: Mesh) -> bool:
    """Whether these degrees are those of a placement: tp inside a host, no cp, experts as said above."""
    request = problem.request
    experts = [p.shape[0] for p in problem.graph.parameters if p.expert and p.shape]
    most = gcd(mesh.dp, *experts) if experts else 1
    return (
        (request.tp is not None or mesh.tp <= problem.cluster.devices_per_host)
        and (request.cp is not None or mesh.cp == 1)
        and (request.ep is not None or mesh.ep in (1, most))
    )


def _frame(problem: Problem, builder: Builder, mesh: Mesh) -> Frame:
    request = problem.request
    share = problem.global_batch // mesh.dp
    sizes = tuple(_microbatches(share, mesh.pp)) if request.microbatch is None else (request.microbatch,)
    wishes = (True, False) if request.sequence_parallel is None else (request.sequence_parallel,)
    schedule = request.schedule or "1f1b"
    for sequence_parallel in wishes:
        point = Point(
            mesh, sizes[0], sequence_parallel, schedule=schedule, offload=request.offload or "none"
        )
        if not builder.refusal(point):
            return Frame(point, sizes, tuple(_rungs(problem, mesh)), request.hybrid)
    return Frame(Point(mesh), (), ())


def _microbatches(share: int, pp: int) -> Iterator[int]:
    """The smallest is always among them."""
    size = 1
    while size <= LARGEST_MICROBATCH and share % size == 0 and (size == 1 or share // size >= pp):
        yield size
        size *= 2


def _rungs(problem: Problem, mesh: Mesh) -> Iterator[Rung]:
    request, blocks = problem.request, problem.graph.repeated_blocks
    seen: set[tuple[ZeroStage, str]] = set()
    for zero, words in RUNGS:
        if request.zero is not None:
            zero = request.zero
        elif mesh.dp * mesh.cp == 1:
            zero = 0
        elif request.hybrid is not None:
            zero = zero or 1
        if request.recompute is not None:
            words = request.recompute
        elif (words == "selective" and not has_attention(problem)) or not blocks:
            words = "none"
        if (zero, words) not in seen:
            seen.add((zero, words))
            yield Rung(zero, recompute_rules(words, blocks))
