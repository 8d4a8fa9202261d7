"""The space of plans: every choice but where stages are cut and which blocks are recomputed.

    mesh           pp · dp · cp · tp = W; W: all devices, or fewer where their number is open: whole hosts, or part of one; on many
                   hosts the next few numbers below all
                   dp divides the batch, ep divides dp and the experts, pp · virtual ≤ units: repeated blocks, embedding, head
    microbatch     a divisor of a dp rank's samples
    schedule       pp > 1: gpipe, 1f1b, zb, zbv, interleaved with v = 2 … MOST_VIRTUAL stages a coordinate, in deep models those
                   that make stages of equal size, and no gpipe: 1f1b is as fast and keeps less
    sharding       ZeRO 0 to 3, in groups of any divisor of a small dp, or of 1, 2, 4 … hosts' ranks; where dp · cp = 1 in 16 bits
                   alone, for parameters that are cast once a step or a block at a time, and not in every microbatch
    context        cp > 1: heads exchanged, or keys and values in a ring
    compile        on a GPU, where no rule of tp or cp is in its way
    offload        what the runtime can run: the optimizer's state anywhere, parameters on one device or over dp with ZeRO 3

A *Shape* is the part that a microbatch's work follows from (mesh, sequence parallel, microbatch, compile); a *Point* is a shape
with schedule and state. What a request fixes stays fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod
from typing import TypeVar

from meshwright.core.axes import RANK_AXES
from meshwright.core.legal import Key
from meshwright.core.pipeline.kinds import SEARCHED, in_flight, kind_of, placement_of
from meshwright.core.pipeline.placement import coordinate_of
from meshwright.core.plan import ContextWay, Mesh, ScheduleKind, ZeroStage
from meshwright.core.request import PlanRequest
from meshwright.rules.divisors import divisors
from meshwright.rules.stages import may_have
from meshwright.searching.problem import OffloadKind, Problem
from meshwright.searching.units import FEW_UNITS, RANKED_UNITS

T = TypeVar("T")

MANY_HOSTS, FEW_WORLDS = 16, 6
"""On more hosts than these, only so many smaller numbers of devices are looked at: the next ones that some mesh divides."""
SMALL_DP = 8
"""Up to so many data-parallel ranks, ZeRO may shard over groups of any size that divides them."""
MOST_VIRTUAL = 8
"""Stages on one coordinate: beyond, sends eat what the smaller bubble saves."""


@dataclass(frozen=True)
class Way:
    """How a microbatch is run over the ranks of tp and cp."""

    sequence_parallel: bool = False
    compile: bool = False
    context: ContextWay = "heads"


@dataclass(frozen=True)
class Shape:
    """What the work of one microbatch follows from."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    sequence_parallel: bool
    microbatch: int
    num_microbatches: int
    compile: bool
    context: ContextWay = "heads"

    @classmethod
    def of(cls, mesh: Mesh, way: Way, microbatch: int, samples: int) -> Shape:
        """samples: of a dp rank in a step."""
        degrees = (mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.ep)
        sizes = (microbatch, samples // microbatch)
        return cls(*degrees, way.sequence_parallel, *sizes, way.compile, way.context)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, ep=self.ep)

    @cached_property
    def of_one_replica(self) -> Shape:
        """The same microbatch on as few ranks as hold all experts, in one stage: its work and memory are the same."""
        return replace(self, pp=1, dp=self.ep, num_microbatches=1)

    def in_microbatches(self, size: int) -> Shape:
        """The same samples in microbatches of another size."""
        return replace(self, microbatch=size, num_microbatches=self.microbatch * self.num_microbatches // size)

    @property
    def key(self) -> Key:
        """What the runtime answers for."""
        return (self.tp, self.cp, self.sequence_parallel, self.context)

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, before ZeRO shards them."""
        return self.dp * self.cp


@dataclass(frozen=True)
class Point:
    """A shape, how its stages take turns, and how its state is kept."""

    shape: Shape
    schedule: ScheduleKind = "1f1b"
    virtual: int = 1
    zero: ZeroStage = 0
    hybrid: int | None = None
    offload: OffloadKind = "none"

    @property
    def num_stages(self) -> int:
        return self.shape.pp * self.virtual

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The coordinate of each stage."""
        placement = placement_of(self.schedule)
        return tuple(coordinate_of(stage, self.shape.pp, placement) for stage in range(self.num_stages))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Microbatches of one stage that each coordinate holds at most."""
        return in_flight(self.schedule, self.shape.pp, self.shape.num_microbatches, self.virtual)

    @property
    def sharding_ranks(self) -> int:
        """Ranks that ZeRO shards state over."""
        return 1 if self.zero == 0 else self.hybrid or self.shape.replicas

    @property
    def casts_ahead(self) -> bool:
        """Whether parameters reach 16 bits before the ops that read them: sharded ones, and those whose masters lie apart."""
        return self.zero > 0 or (self.offload != "none" and self.shape.world == 1)


def worlds(problem: Problem) -> list[int]:
    """How many devices may be used, the most first: where their number is open, whole hosts, or part of one."""
    request = problem.request
    degrees = [request.degrees[axis] for axis in RANK_AXES]
    if all(degree is not None for degree in degrees):
        world = prod(degree or 1 for degree in degrees)
        return [world] if world <= problem.devices and problem.world in (None, world) else []
    if problem.world is not None:
        return [problem.world]
    per_host = problem.cluster.devices_per_host
    found = [number * per_host for number in range(problem.cluster.num_hosts, 0, -1)]
    parts = list(range(per_host - 1, 0, -1))
    if len(found) <= MANY_HOSTS:
        return [*found, *parts]
    smaller = (world for world in found[1:] if next(meshes(problem, world), None) is not None)
    near = [found[0], *islice(smaller, FEW_WORLDS)]
    return near if _can_fill(problem, near[-1]) else [*near, *_halves(near[-1])]


def _can_fill(problem: Problem, world: int) -> bool:
    """Whether a sample on each dp rank, a block on each stage and tp inside hosts make so many ranks."""
    return problem.global_batch * problem.most_stages * problem.cluster.devices_per_host >= world


def _halves(world: int) -> list[int]:
    return [world >> times for times in range(1, world.bit_length())]


def tensor_degrees(problem: Problem, world: int) -> list[int]:
    return [tp for tp in asked_or(problem.request.tp, divisors(world)) if world % tp == 0]


def context_degrees(problem: Problem, world: int, tp: int) -> list[int]:
    return [cp for cp in asked_or(problem.request.cp, divisors(world // tp)) if world % (tp * cp) == 0]


def meshes(problem: Problem, world: int, tensor: int | None = None, context: int | None = None) -> Iterator[Mesh]:
    """Every mesh of so many ranks that the request, the batch and the number of blocks allow. tensor, context: tp and cp alone."""
    request, batch = problem.request, problem.global_batch
    for pp in asked_or(request.pp, [part for part in divisors(world) if part <= problem.most_stages]):
        for tp in asked_or(tensor or request.tp, divisors(world // pp) if world % pp == 0 else []):
            for cp in asked_or(context or request.cp, divisors(world // (pp * tp)) if world % (pp * tp) == 0 else []):
                dp, left = divmod(world, pp * tp * cp)
                if left or batch % dp or request.dp not in (None, dp):
                    continue
                for ep in asked_or(request.ep, divisors(dp) if problem.has_experts else [1]):
                    if dp % ep == 0:
                        yield Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)


def ways(problem: Problem, tp: int, cp: int) -> Iterator[Way]:
    request = problem.request
    for parallel in asked_or(request.sequence_parallel, [False, True] if tp > 1 else [False]):
        for compiled in asked_or(request.compile, [False, True] if may_compile(problem, tp, cp) else [False]):
            for context in context_ways(request, cp):
                yield Way(parallel, compiled, context)


def may_compile(problem: Problem, tp: int, cp: int) -> bool:
    """Whether a search proposes it: on a CPU it is not costed well enough, and the rules of tp and cp are in its way."""
    return problem.cluster.device.kind == "cuda" and tp == cp == 1


def family(problem: Problem, mesh: Mesh, way: Way) -> list[Shape]:
    """Shapes that differ in the microbatch only, the largest first."""
    share = problem.global_batch // mesh.dp
    sizes = [size for size in asked_or(problem.request.microbatch, divisors(share)) if share % size == 0]
    return [Shape.of(mesh, way, size, share) for size in reversed(sizes)]


def families(problem: Problem, mesh: Mesh) -> Iterator[list[Shape]]:
    return (family(problem, mesh, way) for way in ways(problem, mesh.tp, mesh.cp))


def context_ways(request: PlanRequest, cp: int) -> list[ContextWay]:
    """Where tokens lie over ranks, both, or the one that is asked for; heads that do not divide are refused later."""
    if cp == 1:
        return ["heads"]
    return ["heads", "ring"] if request.context is None else [request.context]


def turns(problem: Problem, shape: Shape) -> Iterator[tuple[ScheduleKind, int]]:
    """Schedules with their stages a coordinate."""
    request = problem.request
    if shape.pp == 1:
        if may_have(problem.units, request.virtual or 1, request.ends):
            yield request.schedule or "1f1b", request.virtual or 1
        return
    most = min(MOST_VIRTUAL, problem.most_stages // shape.pp)
    deep = is_deep(problem)
    for schedule in schedules(problem, shape.pp):
        kind = kind_of(schedule)
        if shape.num_microbatches < kind.least_microbatches(shape.pp):
            continue
        fewest, largest = kind.turns
        numbers = [fewest, *range(fewest + 1, min(largest, most) + 1)]
        if deep and len(numbers) > 1:  # stages of unlike size only where every one counts
            numbers = [number for number in numbers if number == 2 or _divides_evenly(problem, number * shape.pp)]
        for virtual in asked_or(request.virtual, numbers):
            if virtual <= max(1, most) and may_have(problem.units, virtual * shape.pp, request.ends):
                yield schedule, virtual


def _divides_evenly(problem: Problem, num_stages: int) -> bool:
    """Whether stages have equally many blocks, with the ends counted as blocks or not."""
    units = problem.units
    return 0 in (units.num_repeated % num_stages, len(units) % num_stages)


def schedules(problem: Problem, pp: int) -> list[ScheduleKind]:
    if pp == 1:
        return [problem.request.schedule or "1f1b"]
    every = [kind for kind in SEARCHED if not (has_many_cuts(problem) and kind_of(kind).keeps_all)]
    return asked_or(problem.request.schedule, every)


def has_many_cuts(problem: Problem) -> bool:
    """Whether not all cuts are compared."""
    return len(problem.units) > RANKED_UNITS


def is_deep(problem: Problem) -> bool:
    return problem.units.num_repeated > FEW_UNITS


def points(problem: Problem, shape: Shape, schedule: ScheduleKind = "1f1b", virtual: int = 1) -> Iterator[Point]:
    """A shape that takes turns in this way, under every ZeRO stage, size of sharding groups, and offload."""
    request = problem.request
    alone = shape.replicas == 1
    casts = problem.other_casting is not None
    stages: tuple[ZeroStage, ...] = (0,) if alone and not casts else (0, 1, 2, 3)
    for zero in asked_or(request.zero, stages):
        groups = [None] if zero == 0 or alone else [None, *_groups(problem, shape)]
        for hybrid in asked_or(request.hybrid, groups):
            if hybrid is not None and (zero == 0 or shape.dp % hybrid):
                continue
            for offload in problem.offloads:
                if alone and zero and offload != "none" and request.zero is None:
                    continue  # what is offloaded is cast ahead without ZeRO
                if offload != "parameters" or _streams(shape, zero, hybrid):
                    yield Point(shape, schedule, virtual, zero, hybrid, offload)


def _streams(shape: Shape, zero: ZeroStage, hybrid: int | None) -> bool:
    """Whether parameters can be streamed: on one device, or cut over all data-parallel ranks (rules/limits.py)."""
    sharded = zero == 3 and hybrid is None
    return shape.pp == shape.cp == shape.tp == shape.ep == 1 and (shape.dp == 1 or sharded)


def _groups(problem: Problem, shape: Shape) -> list[int]:
    """Sizes of sharding groups: all divisors of a small dp; of a large one those that are the ranks of 1, 2, 4 … hosts."""
    found = [part for part in divisors(shape.dp) if 1 < part < shape.replicas]
    if shape.dp <= SMALL_DP:
        return found
    on_host = max(1, problem.cluster.devices_per_host // (shape.tp * shape.cp))
    return [part for part in found if part % on_host == 0 and (part // on_host).bit_count() == 1]


def asked_or(asked: T | None, choices: Iterable[T]) -> list[T]:
    """What the request fixes, or every choice."""
    return list(choices) if asked is None else [asked]
