"""The settings around a placement, for the searches that decide only where blocks lie.

These searches were made for pipelines with one stage on each device, and a plan needs more. So they get *frames*. A frame is a mesh
of equal groups of dp · cp · tp devices, one for each stage, on as many devices as there are, and what is tried with every cut:

    microbatches   powers of two that divide a dp rank's samples, with at least as many microbatches as stages where that
                   goes; from the smallest on as long as a larger one helps                              -> layouts
    rungs          ways to save memory, the plainest first; the fastest that recomputes no more than it must -> RUNGS

Sequence parallel is on where it is legal; experts lie over no ranks, or over as many as they can. What the request fixes has
that value alone.

The layouts a method proposes are sorted by what it expects of them, and the best few are costed          -> shortlist
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.pipeline.kinds import kind_of
from meshwright.core.plan import Mesh, Plan, Recompute, ZeroStage
from meshwright.rules.plain_plan import recompute_rules
from meshwright.searching.choice import ordered
from meshwright.searching.memory_saving.optimizer_offload import with_least_share
from meshwright.searching.methods.builder import Builder
from meshwright.searching.methods.exhaustive import has_attention, meshes, no_plan
from meshwright.searching.methods.loads import Loads, loads_of
from meshwright.searching.problem import Outcome, Problem
from meshwright.searching.space import Point, Shape, Way, context_ways

LARGEST_MICROBATCH = 32
NUM_COSTED = 12
"""Layouts whose plans are estimated in full."""
NUM_SHARES = 3
"""Plans, the fastest first, that are tried with less of the optimizer's state offloaded."""
RUNGS: tuple[tuple[ZeroStage, str], ...] = (
    (0, "none"), (1, "none"), (2, "none"), (1, "selective"), (1, "full"), (2, "full"), (3, "full"),
)  # fmt: skip


@dataclass(frozen=True)
class Rung:
    """One way to save memory, by its place among RUNGS."""

    number: int
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
        return self.plain.shape.mesh

    def point(self, microbatch: int, rung: Rung) -> Point:
        return replace(
            self.plain,
            shape=self.plain.shape.in_microbatches(microbatch),
            zero=rung.zero,
            hybrid=self.hybrid if rung.zero else None,
        )


@dataclass(frozen=True)
class Layout:
    """A cut in a frame, and the seconds a method expects a step of it to take."""

    expected_seconds: float
    point: Point
    counts: tuple[int, ...]
    rules: tuple[Recompute, ...]


Cutter = Callable[[Loads, Point], tuple[float, tuple[int, ...]] | None]
"""Loads and point → expected seconds of a step and the units of each stage; None: none has room."""


def layouts(builder: Builder, frame: Frame, cut: Cutter) -> list[Layout]:
    """What a method finds in one frame: one for every microbatch size that made a step faster than the one before."""
    found: list[Layout] = []
    for microbatch in frame.microbatches:
        layout = _fastest(builder, frame, microbatch, cut)
        if layout is None or (found and layout.expected_seconds >= found[-1].expected_seconds):
            break
        found.append(layout)
    return found


def _fastest(builder: Builder, frame: Frame, microbatch: int, cut: Cutter) -> Layout | None:
    """Of the rungs that recompute as little as fits."""
    found: Layout | None = None
    for rung in frame.rungs:
        if found is not None and rung.rules != found.rules:
            break
        point = frame.point(microbatch, rung)
        answer = cut(loads_of(builder, point, rung.rules), point)
        if answer is not None and (found is None or answer[0] < found.expected_seconds):
            found = Layout(answer[0], point, answer[1], rung.rules)
    return found


def shortlist(builder: Builder, found: list[Layout]) -> Outcome:
    """The most promising layouts costed, and further ones as long as none of them fits."""
    costed: list[tuple[Plan, Estimate]] = []
    fits = False
    for layout in sorted(found, key=lambda layout: layout.expected_seconds):
        if fits and len(costed) >= NUM_COSTED:
            break
        plan = builder.plan(layout.point, layout.counts, layout.rules)
        try:
            estimate = builder.problem.cost(plan)
        except PlanError:
            continue  # the model cannot be cut there
        costed.append((plan, estimate))
        fits = fits or estimate.fits
    if not costed:
        raise no_plan(builder.problem)
    return with_least_shares(Outcome(tuple(costed), len(found)), builder.problem)


def with_least_shares(outcome: Outcome, problem: Problem) -> Outcome:
    """Adds the fastest plans that offload the optimizer's state, with as much of it on the device as fits."""
    if problem.request.offload_share is not None:
        return outcome
    away = ordered([pair for pair in outcome.costed if pair[0].offload.what == "optimizer" and pair[1].fits])
    found = [better for pair in away[:NUM_SHARES] if (better := with_least_share(pair, problem)) is not None]
    return replace(outcome, costed=(*found, *outcome.costed)) if found else outcome


def frames(problem: Problem, builder: Builder) -> list[Frame]:
    """Those on the most devices that any frame can use."""
    _check_one_stage(problem)
    by_world: dict[int, list[Mesh]] = {}
    for mesh in meshes(problem):
        if _is_worth_it(problem, mesh):
            by_world.setdefault(mesh.world, []).append(mesh)
    for world in sorted(by_world, reverse=True):
        found = [_frame(problem, builder, mesh) for mesh in by_world[world]]
        legal = [frame for frame in found if frame is not None]
        if legal:
            return legal
    raise no_plan(problem)


def _check_one_stage(problem: Problem) -> None:
    request = problem.request
    if (request.schedule and kind_of(request.schedule).has_turns) or (request.virtual or 1) > 1:
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


def _frame(problem: Problem, builder: Builder, mesh: Mesh) -> Frame | None:
    """None where no plan on this mesh runs."""
    request = problem.request
    share = problem.global_batch // mesh.dp
    sizes = tuple(_microbatches(share, mesh.pp)) if request.microbatch is None else (request.microbatch,)
    if share % sizes[0]:
        return None
    wishes = (True, False) if request.sequence_parallel is None else (request.sequence_parallel,)
    for sequence_parallel, context in product(wishes, context_ways(request, mesh.cp)):
        way = Way(sequence_parallel, bool(request.compile), context)
        shape = Shape.of(mesh, way, sizes[0], share)
        point = Point(shape, request.schedule or "1f1b", offload=problem.offloads[0])
        if builder.runs(point):
            return Frame(point, sizes, tuple(_rungs(problem, mesh)), request.hybrid)
    return None


def _microbatches(share: int, pp: int) -> Iterator[int]:
    """The smallest is always among them."""
    size = 1
    while size <= LARGEST_MICROBATCH and share % size == 0 and (size == 1 or share // size >= pp):
        yield size
        size *= 2


def _rungs(problem: Problem, mesh: Mesh) -> Iterator[Rung]:
    request, blocks = problem.request, problem.graph.repeated_blocks
    seen: set[tuple[ZeroStage, str]] = set()
    for number, (zero, words) in enumerate(RUNGS):
        if request.zero is not None:
            zero = request.zero
        elif mesh.dp * mesh.cp == 1:
            zero = 0
        elif request.hybrid is not None:
            zero = zero or 1
        if request.recompute is not None:
            words = request.recompute
        elif request.offload == "parameters" and blocks:  # streamed blocks are recomputed in full
            words = "full"
        elif (words == "selective" and not has_attention(problem)) or not blocks:
            words = "none"
        if (zero, words) not in seen:
            seen.add((zero, words))
            yield Rung(number, zero, recompute_rules(words, blocks))
