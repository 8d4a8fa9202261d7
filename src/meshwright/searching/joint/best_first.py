"""Best first over a problem's space: the node with the least bound is opened next. The levels are told in joint.py."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf

from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan, ScheduleKind
from meshwright.core.result import SearchProgress
from meshwright.searching.bounds.step_seconds import SLACK, Bounds
from meshwright.searching.cuts.best_cut import best_cut, cut_of_several
from meshwright.searching.cuts.ranked_cuts import RankedCuts, can_rank
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.memory_saving.optimizer_offload import with_best_share
from meshwright.searching.memory_saving.parameter_streaming import fitted_streamed
from meshwright.searching.memory_saving.recompute import fitted
from meshwright.searching.problem import Problem
from meshwright.searching.space import (
    Point,
    Shape,
    Way,
    context_degrees,
    family,
    meshes,
    points,
    tensor_degrees,
    turns,
    ways,
    worlds,
)
from meshwright.searching.units import Cut, even_cut

MOST_COSTED = 160
"""Cuts that are costed before the search gives its best so far."""
MOST_OPENED = 1800
"""Nodes of all levels, likewise."""

Opened = Iterable[tuple[float, "Open"]]
Open = Callable[[], Opened]


class BestFirst:
    """known: plans that were costed before; limit_seconds: slower ones are not looked for. stage: how people are told of it."""

    def __init__(
        self,
        problem: Problem,
        drafts: Drafts,
        *,
        known: list[tuple[Plan, Estimate]] | None = None,
        limit_seconds: float = inf,
        most_costed: int = MOST_COSTED,
        most_opened: int = MOST_OPENED,
        stage: str = "all plans",
    ) -> None:
        self.problem, self.stage = problem, stage
        self.drafts = drafts
        self.best_seconds = limit_seconds
        self.take(known or [])
        self.most_costed, self.most_opened = most_costed, most_opened
        self.num_costed = 0
        self.untried_seconds = inf
        """The least bound of plans at points that were opened, but whose cuts or shares were not all tried."""
        self._open: list[tuple[float, int, Open]] = []
        self._numbers = count()

    def take(self, known: list[tuple[Plan, Estimate]]) -> None:
        """These are all that were costed."""
        self.costed = list(known)
        self._known = {identity(plan) for plan, _ in self.costed}
        fitting = [pair for pair in self.costed if pair[1].fits]
        self.fastest = min(fitting, key=lambda pair: pair[1].step_seconds, default=None)
        if self.fastest is not None:
            self.best_seconds = min(self.best_seconds, self.fastest[1].step_seconds)

    @property
    def is_cut_short(self) -> bool:
        """Whether it ended with nodes that may hold better plans."""
        return bool(self._open)

    def run(self) -> None:
        self._push(self._worlds(), 0.0)
        opened_nodes = 0
        while self._open and self.num_costed < self.most_costed and opened_nodes < self.most_opened:
            opened_nodes += 1
            bound, _, opened = heapq.heappop(self._open)
            if bound >= self.best_seconds:
                self._open = []
                break
            self._push(opened(), bound)
            self._tell(bound)

    def _tell(self, bound: float) -> None:
        """bound: of the node that was opened last."""
        if self.problem.watch is None:
            return
        if self.fastest is not None:
            self.drafts.best_seconds = min(self.drafts.best_seconds, self.fastest[1].step_seconds)
        best = self.drafts.best_seconds
        progress = SearchProgress(
            stage=self.stage,
            num_costed=len(self.drafts.fitted),
            best_seconds=best if best < inf else None,
            bound_seconds=bound or None,
        )
        self.problem.watch(progress)

    @property
    def bound_seconds(self) -> float:
        """No plan that was not costed is faster; infinite where none fits."""
        still_open = self._open[0][0] if self._open else self.best_seconds
        return min(still_open, self.untried_seconds)

    def _push(self, nodes: Opened, parent: float) -> None:
        """parent: what bounds a node bounds all below it."""
        for own, opened in nodes:
            bound = max(own, parent)
            if bound < self.best_seconds:
                heapq.heappush(self._open, (bound, next(self._numbers), opened))

    # ------------------------------------------------------------ levels

    def _worlds(self) -> Opened:
        for world in worlds(self.problem):
            bound = self._evenly(world, tensor_degrees(self.problem, world))
            yield bound, lambda world=world: self._tensor(world)  # type: ignore[misc]

    def _tensor(self, world: int) -> Opened:
        for tp in tensor_degrees(self.problem, world):
            yield self._evenly(world, [tp]), lambda tp=tp: self._submeshes(world, tp)  # type: ignore[misc]

    def _submeshes(self, world: int, tp: int) -> Opened:
        degrees = context_degrees(self.problem, world, tp)
        for cp in degrees:
            if not self._larger_is_quicker or _coarser(cp, degrees) is None:
                yield from self._contexts(world, tp, cp, degrees)

    def _contexts(self, world: int, tp: int, cp: int, degrees: list[int]) -> Opened:
        """This cp in each way, and those that split its ranks' tokens further: what bounds this one bounds them."""
        least = inf
        for way in ways(self.problem, tp, cp):
            bound = SLACK * self.drafts.tables.device_seconds(tp, cp, way) / world
            least = min(least, bound)
            yield bound, lambda way=way: self._families(world, tp, cp, way)  # type: ignore[misc]
        for further in degrees:
            if self._larger_is_quicker and _coarser(further, degrees) == cp:
                yield least, lambda further=further: self._contexts(world, tp, further, degrees)  # type: ignore[misc]

    def _evenly(self, world: int, tensor: list[int]) -> float:
        """All of the work shared out over all devices, under the tp and the cp that make it least. Where larger is quicker, these
        are the smallest: no further split makes a sample cheaper."""
        degrees = ((tp, cp) for tp in tensor for cp in context_degrees(self.problem, world, tp))
        if self._larger_is_quicker:
            degrees = ((tp, 1) for tp in tensor[:1])
        return SLACK * min((self.drafts.tables.least_device_seconds(*one) for one in degrees), default=inf) / world

    def could_use(self, world: int) -> bool:
        """Whether so many devices may be faster than the best plan, by all that is known about them together."""
        return self._evenly(world, tensor_degrees(self.problem, world)) < self.best_seconds

    @property
    def _larger_is_quicker(self) -> bool:
        return self.drafts.tables.larger_is_quicker

    def _families(self, world: int, tp: int, cp: int, way: Way) -> Opened:
        """What bounds the way bounds them. A bound of their own takes long: it is found for those whose turn comes."""
        for mesh in meshes(self.problem, world, tp, cp):
            if found := family(self.problem, mesh, way):
                yield 0.0, lambda found=found: self._family(found)  # type: ignore[misc]

    def _family(self, family: list[Shape]) -> Opened:
        yield self._family_bound(family), lambda: self._shapes(family)

    def _shapes(self, family: list[Shape]) -> Opened:
        """Likewise."""
        for shape in family:
            yield self.work_bound(shape), lambda shape=shape: self._shape(shape)  # type: ignore[misc]

    def _shape(self, shape: Shape) -> Opened:
        yield self._shape_bound(shape), lambda: self._turns(shape)

    def work_bound(self, shape: Shape) -> float:
        """By its work alone."""
        return min((one.of_shape(shape) for one in self.drafts.tables.bounds_of_both(shape)), default=inf)

    def _family_bound(self, family: list[Shape]) -> float:
        """Found once by all parts of the search that leave the state open, or fix it, alike."""
        request, known = self.problem.request, self.drafts.family_bounds
        key = (family[0], family[-1], request.zero, request.hybrid, request.offload)
        if key not in known:
            known[key] = self._of_family(family)
        return known[key]

    def _shape_bound(self, shape: Shape) -> float:
        """Likewise, and the turns."""
        request, known = self.problem.request, self.drafts.shape_bounds
        key = (shape, request.zero, request.hybrid, request.offload, request.schedule, request.virtual)
        if key not in known:
            known[key] = self._of_shape(shape)
        return known[key]

    def _of_family(self, family: list[Shape]) -> float:
        """The least work of any of its microbatches, and the state that adds least to the largest, behind which most is hidden, of
        those that fit with the smallest."""
        best = inf
        if self.drafts.tables.sharding(family[0]) is None:
            return inf
        smallest, quickest = family[-1], self._quickest(family)
        works = {sharded: self._least_work(family, quickest, sharded) for sharded in (False, True)}
        for point in points(self.problem, smallest):
            evenly, work = works[point.casts_ahead]
            if work < best and self.drafts.needs(point) is not None:
                best = min(best, max(work, evenly + self.drafts.once(replace(point, shape=quickest[0]))))
        return best

    def _quickest(self, family: list[Shape]) -> list[Shape]:
        """Shapes of which one takes the least for a sample, the largest first. Where larger is quicker, that is the whole batch at
        once, whatever dp is: its work is found once for all meshes."""
        if len(family) == 1 or not self._larger_is_quicker:
            return family
        return [replace(family[0], microbatch=self.problem.global_batch, num_microbatches=1)]

    def _least_work(self, family: list[Shape], quickest: list[Shape], sharded: bool) -> tuple[float, float]:
        """Of a family's samples, were they run as the quickest are: on an average coordinate, and on any."""
        samples = family[0].microbatch * family[0].num_microbatches
        evenly = least = inf
        for shape in quickest:
            bounds = self.drafts.tables.bounds(shape, sharded=sharded)
            if bounds is not None:
                share = samples / (shape.microbatch * shape.num_microbatches)
                evenly = min(evenly, bounds.evenly(shape) * share)
                least = min(least, bounds.of_shape(shape) * share)
        return evenly, least

    def _of_shape(self, shape: Shape) -> float:
        """The quickest turns, under the state that adds least to them of those that fit, with the recompute that they need."""
        ways = list(turns(self.problem, shape))
        held = self.drafts.fewest_held(shape, ways)
        best = inf
        for seconds, point, bounds in sorted(self._states(shape), key=lambda one: one[0]):
            if seconds >= best:
                break  # no turns are quicker than none
            needs = self.drafts.needs(point)
            if needs is None or needs.seconds >= best:
                continue
            least = self.drafts.under_any_schedule(point, held)
            if least >= best:
                continue
            for schedule, virtual in ways:
                if bounds.with_turns(shape, needs, schedule, virtual) < best:
                    own = self.drafts.with_turns(replace(point, schedule=schedule, virtual=virtual))
                    best = min(best, max(least, own))
        return best

    def _states(self, shape: Shape) -> Iterator[tuple[float, Point, Bounds]]:
        """Each with seconds that no step of it beats, whatever its memory."""
        for point in points(self.problem, shape):
            bounds = self.drafts.bounds(point)
            if bounds is not None:
                yield 0.0 if point.offload == "parameters" else bounds.needs(point, 0.0).seconds, point, bounds

    def _turns(self, shape: Shape) -> Opened:
        known = self.drafts.tables.bounds_of_both(shape)
        for schedule, virtual in turns(self.problem, shape) if known else ():
            bound = min(one.of_turns(shape, schedule, virtual) for one in known)
            yield bound, lambda schedule=schedule, virtual=virtual: self._points(shape, schedule, virtual)  # type: ignore[misc]

    def _points(self, shape: Shape, schedule: ScheduleKind, virtual: int) -> Opened:
        for point in points(self.problem, shape, schedule, virtual):
            if (bound := self.drafts.bound(point)) is not None:
                self.drafts.points.add(point)
                if bound < self.best_seconds:
                    bound = max(bound, self.drafts.of_coordinates(point))
                yield bound, lambda point=point: self._cuts(point)  # type: ignore[misc]

    def _cuts(self, point: Point) -> Opened:
        bounds, room = self.drafts.bounds(point), self.drafts.room(point)
        assert bounds is not None
        assert room is not None
        units = bounds.table.num_units
        if point.offload == "parameters":  # in one stage; its room was looked at
            yield 0.0, lambda: self.cost(point, (units,))
            return
        ends = self.problem.request.ends
        if ends is not None:
            yield from self._one_cut(point, even_cut(self.drafts.units, point.num_stages, ends), 0.0)
        elif can_rank(units, point.num_stages):
            cuts = RankedCuts(bounds, room)
            yield cuts.least_seconds, lambda: self._ranked(point, cuts)
        elif point.virtual == 1:
            best = best_cut(bounds, room)
            if best is not None:
                if point.num_stages > 1:
                    self._leave(bounds.of_every_cut(room, best[1]))
                yield from self._one_cut(point, *best)
        else:
            least = bounds.of_every_cut(room, self.drafts.of_coordinates(point))
            self._leave(least)
            # a good cut takes long to find: only where its turn comes
            yield least, lambda: self._one_cut(point, cut_of_several(bounds.table, room), least)

    def _one_cut(self, point: Point, cut: Cut, least: float) -> Opened:
        """least: as for `Bounds.of_cut`."""
        bounds, room = self.drafts.bounds(point), self.drafts.room(point)
        assert bounds is not None
        assert room is not None
        if not self._must_fit or room.cut_fits(cut):
            yield bounds.of_cut(room, cut, least), lambda: self.cost(point, cut)

    def _ranked(self, point: Point, cuts: RankedCuts) -> Opened:
        """The next of all cuts that may be better than the best plan; behind it, those after it."""
        found = cuts.step(self.best_seconds, must_fit=self._must_fit)
        if found is not None:
            cut, least = found
            yield cuts.bounds.of_cut(cuts.room, cut, least), lambda: self.cost(point, cut)
        if cuts.least_seconds < inf:
            yield cuts.least_seconds, lambda: self._ranked(point, cuts)

    def cost_point(self, point: Point) -> None:
        """Its best cut, without opening anything else."""
        nodes = list(self._cuts(point))
        before = self.num_costed
        while nodes and self.num_costed == before:
            bound, opened = nodes.pop(0)
            if bound < self.best_seconds:
                nodes = [*opened(), *nodes]

    def _leave(self, bound: float) -> None:
        """Plans that are not looked at: what is proven goes no further than their bound."""
        self.untried_seconds = min(self.untried_seconds, bound)

    def cost(self, point: Point, cut: Cut) -> Opened:
        plan = self.drafts.plan(point, cut)
        if plan is None or identity(plan) in self._known:
            return ()
        try:
            costed = self._fitted(point, cut, plan)
        except PlanError:
            return ()  # a block that reads what a later stage makes, or the like: no such plan
        self.num_costed += 1
        if costed is None:
            return ()
        self.costed.append(costed)
        if costed[1].fits and costed[1].step_seconds < self.best_seconds:
            self.fastest, self.best_seconds = costed, costed[1].step_seconds
        return ()

    @property
    def _must_fit(self) -> bool:
        """Plans that do not fit are of interest only where none does."""
        return self.best_seconds < inf

    def _fitted(self, point: Point, cut: Cut, plan: Plan) -> tuple[Plan, Estimate] | None:
        """Found once by all parts of the search; None where it does not fit, though it must."""
        key = (*identity(plan), self.problem.request.recompute)
        known = self.drafts.fitted
        if key not in known or (known[key] is None and not self._must_fit):
            found = self._fit(point, cut, plan)
            known[key] = found if found is not None and self.problem.hosts_hold(found[1].host_bytes) else None
        return known[key]

    def _fit(self, point: Point, cut: Cut, plan: Plan) -> tuple[Plan, Estimate] | None:
        """With the recompute it needs, and as much away as is best."""
        problem, microbatch, must_fit = self.problem, self.drafts.tables.microbatch(plan), self._must_fit
        if point.offload == "parameters":
            return fitted_streamed(problem, plan, microbatch, must_fit=must_fit)
        bounds = self.drafts.bounds(point)
        assert bounds is not None
        fit = partial(fitted, problem, point, cut, table=bounds.table, microbatch=microbatch, must_fit=must_fit)
        if point.offload == "optimizer":
            return with_best_share(problem, plan, fit, self.best_seconds)
        return fit(plan)


def _coarser(degree: int, degrees: list[int]) -> int | None:
    """The largest of the others that divides it."""
    return max((one for one in degrees if one < degree and degree % one == 0), default=None)


def identity(plan: Plan) -> tuple[object, ...]:
    """What makes two plans the same but for their recompute and for how much is offloaded, which follow from the rest."""
    same = (getattr(plan, name) for name in plan.__struct_fields__ if name not in ("recompute", "offload"))
    return (*same, plan.offload.what)
