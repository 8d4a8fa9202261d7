"""Every plan of the space, each costed: slow, plain, and the measure of the other searches.

A plan is a point, a cut and the rules of recompute. A point is one of                                     -> points

    mesh          all pp, dp, cp, tp ≥ 1 with pp · dp · cp · tp ≤ devices (= ranks, where their number is fixed), dp a
                  divisor of the global batch; ep all divisors of dp, where the model has experts        -> meshes
    × sequence parallel   without; and with it, where tp > 1
    × ZeRO        0; and 1, 2, 3, where dp · cp > 1; those over all ranks of dp and cp, and over groups (hybrid) of every
                  divisor of dp from 2 to less than all                                                   -> _shardings
    × microbatch  all divisors of a dp rank's samples
    × schedule    1f1b where pp = 1; else gpipe, 1f1b, zb, zbv, and interleaved for all v with n ≥ v · pp -> _schedules
    × offload     none; and optimizer and parameters, where the hosts' memory and the link to it are known and hold them;
                  the optimizer's state in all shares that differ, of many a few; parameters in windows of WINDOWS blocks,
                  whose inputs wait on the device or on the host                                        -> offloadings
    × compile     no; and yes, on a GPU

n units (rules/stages.py) are cut into s = pp · v stages in all C(n-1, s-1) ways of giving each stage at least one, or as the
request places the ends                                                                                   -> stage_counts
and recomputed in one of these ways, each set of blocks once:                                             -> recomputes

    none, all in full, every k-th in full for k = 2 … n; the attention of all, where the model has some
    the first c of each stage in full for all c = 0 … its number, where n ≤ SMALL_MODEL_BLOCKS

What the request fixes has that value alone. Left out is what a plan or the cost model refuses (a PlanError), what the runtime
refused, and what `core/limits.not_yet` lists. dualpipev is considered where the request asks for it.
No bound leaves anything out; a space of more than `most_plans` is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import msgspec

from meshwright.core.errors import PlanError, ScheduleError
from meshwright.core.estimate import Estimate
from meshwright.core.names import compact_names
from meshwright.core.pipeline.kinds import SEARCHED, ScheduleKind, kind_of
from meshwright.core.plan import Mesh, Offload, Plan, Recompute, ZeroStage
from meshwright.core.request import PlanRequest
from meshwright.cost.compute.recomputed_ops import core_ops
from meshwright.rules.divisors import divisors
from meshwright.rules.limits import not_yet
from meshwright.rules.plain_plan import recompute_rules
from meshwright.rules.stages import Units, unit_counts
from meshwright.searching.infeasible.plain_refusal import plain_refusal
from meshwright.searching.memory_saving.optimizer_offload import FEW_SHARES, coarse_shares, shares_of
from meshwright.searching.methods.builder import Builder
from meshwright.searching.problem import OffloadKind, Outcome, Problem
from meshwright.searching.space import Point, Shape, Way, asked_or, context_ways
from meshwright.searching.units import every_cut, num_cuts, sizes_of

MOST_PLANS = 20_000
"""A few minutes for a model of a few blocks."""
SMALL_MODEL_BLOCKS = 6
"""Up to so many repeated blocks, every stage may recompute a number of its own."""

WINDOWS = (2, 3)
"""Blocks of streamed parameters on the device: the fewest, and more."""
STASHES = ("device", "host")

Counts = tuple[int, ...]
Rules = tuple[Recompute, ...]


def exhaustive(problem: Problem, most_plans: int = MOST_PLANS) -> Outcome:
    _check_size(problem, most_plans)
    costed = []
    for plan in plans(problem):
        try:
            found = problem.cost(plan)
        except (PlanError, ScheduleError):
            continue  # the model cannot be cut there, or the schedule needs more microbatches
        if problem.hosts_hold(found.host_bytes):
            costed.append((plan, found))
    if not costed:
        raise no_plan(problem)
    return Outcome(tuple(costed), len(costed), _fastest(costed), tuple(_left_out(problem)))


def _left_out(problem: Problem) -> Iterator[str]:
    request, num_repeated = problem.request, len(problem.graph.repeated_blocks)
    if request.schedule is None and request.pp != 1 and num_repeated > 1 and problem.devices > 1:
        yield "schedule dualpipev"


def _fastest(costed: list[tuple[Plan, Estimate]]) -> float | None:
    return min((found.step_seconds for _, found in costed if found.fits), default=None)


def plans(problem: Problem) -> Iterator[Plan]:
    """All plans of the space, those among them that only the cost model refuses."""
    builder = Builder(problem)
    for point in points(problem):
        for counts in stage_counts(problem, point.num_stages):
            ways = offloadings(problem, builder.plan(point, counts))
            for rules, offload in product(recomputes(problem, counts), ways):
                plan = builder.plan(point, counts, rules, offload)
                if not not_yet(plan):
                    yield plan


# ---------------------------------------------------------------- points


def points(problem: Problem) -> Iterator[Point]:
    """Every mesh with every setting that some plan can have."""
    builder, request = Builder(problem), problem.request
    for mesh in meshes(problem):
        share = problem.global_batch // mesh.dp
        settings = product(
            asked_or(request.sequence_parallel, [False, True] if mesh.tp > 1 else [False]),
            _shardings(request, mesh),
            [size for size in divisors(share) if request.microbatch in (None, size)],
            _schedules(request, mesh, problem.most_stages),
            problem.offloads,
            asked_or(request.compile, [False, True] if problem.cluster.device.kind == "cuda" else [False]),
            context_ways(request, mesh.cp),
        )
        for sequence_parallel, sharding, microbatch, turns, offload, compiled, context in settings:
            shape = Shape.of(mesh, Way(sequence_parallel, compiled, context), microbatch, share)
            point = Point(shape, *turns, *sharding, offload)
            if builder.runs(point):
                yield point


def meshes(problem: Problem) -> Iterator[Mesh]:
    """Degrees as the request has them, on any number of devices up to all."""
    request, devices = problem.request, problem.devices
    for dp in _degrees(request.dp, devices):
        if problem.global_batch % dp:
            continue
        for tp in _degrees(request.tp, devices // dp):
            for cp in _degrees(request.cp, devices // (dp * tp)):
                for pp in _degrees(request.pp, devices // (dp * tp * cp)):
                    if problem.world not in (None, dp * tp * cp * pp):
                        continue
                    for ep in divisors(dp) if problem.has_experts else [1]:
                        if request.ep in (None, ep):
                            yield Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)


def _degrees(fixed: int | None, most: int) -> list[int]:
    return [degree for degree in range(1, most + 1) if fixed in (None, degree)]


def _shardings(request: PlanRequest, mesh: Mesh) -> list[tuple[ZeroStage, int | None]]:
    """ZeRO's stage, and the group it shards over."""
    ranks = mesh.dp * mesh.cp
    stages: list[ZeroStage] = [0, 1, 2, 3] if ranks > 1 else [0]
    if request.hybrid is not None:
        stages = [1, 2, 3]
    groups = asked_or(request.hybrid, [None, *(size for size in divisors(mesh.dp) if 1 < size < ranks)])
    return [
        (zero, group) for zero in asked_or(request.zero, stages) for group in (groups if zero else [request.hybrid])
    ]


def _schedules(request: PlanRequest, mesh: Mesh, most_stages: int) -> list[tuple[ScheduleKind, int]]:
    """Each with its number of stages a coordinate."""
    kinds: tuple[ScheduleKind, ...] = SEARCHED if mesh.pp > 1 else ("1f1b",)
    found: list[tuple[ScheduleKind, int]] = []
    for kind in asked_or(request.schedule, kinds):
        fewest, most = kind_of(kind).turns
        turns = range(fewest, (most if most == fewest else most_stages // mesh.pp) + 1)
        found += [(kind, v) for v in turns if request.virtual in (None, v)]
    return found


def offloadings(problem: Problem, plan: Plan) -> list[Offload]:
    """Every way to offload what the plan does."""
    plain = plan.offload
    if plain.what == "parameters":
        ways = product(WINDOWS, STASHES)
        return [msgspec.structs.replace(plain, window=window, stash=stash) for window, stash in ways]
    if plain.what == "none" or problem.request.offload_share is not None:
        return [plain]
    shares = shares_of(problem, plan)
    few = shares if len(shares) <= FEW_SHARES else coarse_shares(plan)
    return [msgspec.structs.replace(plain, share=share) for share in few]


# ---------------------------------------------------------------- cuts and recompute


def stage_counts(problem: Problem, num_stages: int) -> Iterator[Counts]:
    """Units of each stage: as the request places the ends, or in every way."""
    ends = problem.request.ends
    if ends is not None:
        return iter([tuple(unit_counts(problem.units, num_stages, ends))])
    return (tuple(sizes_of(cut)) for cut in every_cut(len(problem.units), num_stages))


def recomputes(problem: Problem, counts: Counts) -> list[Rules]:
    """Every way to recompute, each set of blocks once. counts: units of each stage."""
    blocks, words = problem.graph.repeated_blocks, problem.request.recompute
    if words is not None or not blocks:
        return [recompute_rules(words or "none", blocks)]
    found = dict.fromkeys(recompute_rules(text, blocks) for text in _words(len(blocks), has_attention(problem)))
    if len(blocks) <= SMALL_MODEL_BLOCKS:
        found |= dict.fromkeys(_by_stage(blocks, _repeated(problem.units, counts)))
    return list(found)


def _words(num_repeated: int, has_attention: bool) -> list[str]:
    strides = [f"every:{stride}" for stride in range(2, num_repeated + 1)]
    return ["none", *(["selective"] if has_attention else []), "full", *strides]


def has_attention(problem: Problem) -> bool:
    kinds = problem.graph.kind_by_block
    return any(
        core_ops(kind) for kind in {kinds[name].name: kinds[name] for name in problem.graph.repeated_blocks}.values()
    )


def _repeated(units: Units, counts: Counts) -> Counts:
    """Repeated blocks of each stage."""
    found = list(counts)
    found[0] -= units.embedding
    found[-1] -= units.head
    return tuple(found)


def _by_stage(blocks: tuple[str, ...], counts: Counts) -> Iterator[Rules]:
    """The first few blocks of each stage, for every few."""
    for numbers in product(*(range(count + 1) for count in counts)):
        chosen: list[str] = []
        start = 0
        for number, count in zip(numbers, counts, strict=True):
            chosen += blocks[start : start + number]
            start += count
        yield (Recompute(mode="full", blocks=compact_names(chosen)),) if chosen else ()


# ---------------------------------------------------------------- size


def count_plans(problem: Problem, most: int | None = None) -> int:
    """How many plans the space has, by counting cuts rather than making them, and those that offload as if all ran; stops behind
    `most`."""
    total = 0
    choices = lru_cache(maxsize=None)(lambda num_stages: _num_choices(problem, num_stages))
    for point in points(problem):
        total += choices(point.num_stages) * _most_ways(problem, point.offload)
        if most is not None and total > most:
            break
    return total


def _most_ways(problem: Problem, offload: OffloadKind) -> int:
    """To offload: of shares there are no more than parameters."""
    if offload == "optimizer" and problem.request.offload_share is None:
        return min(FEW_SHARES, len(problem.graph.parameters) + 1)
    return len(WINDOWS) * len(STASHES) if offload == "parameters" else 1


def _num_choices(problem: Problem, num_stages: int) -> int:
    """Cuts times ways to recompute."""
    num_units = len(problem.units)
    if problem.units.num_repeated <= SMALL_MODEL_BLOCKS:
        return sum(len(recomputes(problem, counts)) for counts in stage_counts(problem, num_stages))
    cuts = num_cuts(num_units, num_stages) if problem.request.ends is None else 1
    return cuts * len(recomputes(problem, (num_units,)))


def _check_size(problem: Problem, most_plans: int) -> None:
    if count_plans(problem, most_plans) > most_plans:
        raise PlanError(
            f"an exhaustive search of '{problem.graph.model}' on {problem.devices} devices costs more than {most_plans:,} plans: "
            "fix more of the plan (--pp, --tp, --schedule, --recompute, --microbatch), or use another --search"
        )


def no_plan(problem: Problem) -> PlanError:
    """Why the space is empty: what the plain plan of the request is refused for, if it is."""
    return plain_refusal(problem, problem.request, problem.world or problem.devices) or PlanError(
        f"no plan for '{problem.graph.model}' on {problem.devices} devices with global batch {problem.global_batch} agrees with "
        "the request: leave a flag out, or change the batch"
    )
