"""The table of units: for each unit the seconds, activation bytes and state of one microbatch, as the cost room counts them.

There is one table for every way to divide a microbatch (tp, cp, ep, sequence parallel, its samples, compile, casting). The sum over
a row of units is what a stage of these units takes, so bounds and cuts need no estimate of their own:

    seconds of a stage, forward or backward   launches + kernels on a CPU, the larger of both on a GPU, + inner collectives
    kept                                      bytes held between forward and backward of a microbatch, by recompute mode
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.cost.compute.recomputed_ops import ActivationMode
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.memory.local_parameters import split_dims
from meshwright.cost.memory.peak_memory import MemoryCost
from meshwright.cost.memory.rank_state import RankState
from meshwright.cost.microbatch import Microbatch
from meshwright.cost.passes import StagePasses, passes_by_stage, sent_bytes
from meshwright.cost.stages import StageCosts
from meshwright.rules.kinds import cached_in_value
from meshwright.searching.problem import Problem
from meshwright.searching.recompute_curve import recompute_curve
from meshwright.searching.unit_elements import Trained, elements_of

Row = NDArray[np.float64]
Places = NDArray[np.int64]
"""Where rows of units begin or end, many at once."""
MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of an element of the block that runs, beside what its rank holds of it: gathered, its gradient, and what is reduced."""

    gathered: float = 0.0
    gradient: float = 0.0
    reduced: float = 0.0


@dataclass(frozen=True)
class Beside:
    """Bytes that each unit needs while it runs, in addition to what is kept for backward."""

    by_unit: Row
    only: float
    """Of a coordinate that runs all units."""

    @cached_property
    def least(self) -> float:
        return float(self.by_unit.min())

    @cached_in_value
    def on_all(self, p: int) -> float:
        """Bytes on p coordinates together: each runs the last unit of a stage."""
        p = min(p, len(self.by_unit))
        if p == 1:
            return self.only
        middle = (p - 2) * float(self.by_unit[1:-1].min()) if p > 2 else 0.0
        return self._of_first_stage + float(self.by_unit[-1]) + middle

    @cached_in_value
    def least_of(self, p: int) -> float:
        """Bytes on each of p coordinates."""
        if min(p, len(self.by_unit)) == 1:
            return self.only
        return min(self._of_first_stage, float(self.by_unit[-1]))

    @property
    def _of_first_stage(self) -> float:
        """The least value of a unit that can be the last of the first stage, where this is not the last stage too."""
        return float(self.by_unit[:-1].min())


@dataclass(frozen=True)
class UnitTable:
    """Prefix sums over units: entry i is the sum over the first i units."""

    is_cpu: bool
    forward_launch: Row
    forward_kernel: Row
    backward_launch: Row
    backward_kernel: Row
    inner_forward: Row
    weights: Row
    recompute_launch: dict[str, Row]
    recompute_kernel: dict[str, Row]
    inner_backward: dict[str, Row]
    kept: dict[str, Row]
    peaks: dict[str, Row]
    """One value per unit, no prefix sums: bytes while the unit runs, in addition to what is kept."""
    sent: Row
    """Bytes that each unit but the last hands to the next. No prefix sums."""
    elements: Row
    """Elements of parameters as tp splits them. A tied tensor counts at its first name; experts are counted apart."""
    expert_elements: Row
    made_shares: dict[str, Row]
    """One value per unit, likewise: the share of the gradients of its last block that backward has made when it is at this peak."""
    last_elements: Row
    """One value per unit, no prefix sums: trained parameters of its last block, which backward begins with."""
    reduced_elements: Row
    """One value per unit, no prefix sums: the largest group of gradients that is reduced behind one of its blocks."""
    regathered_shares: Row
    """One value per unit, no prefix sums: the share of its parameters that ZeRO 3 gathers again for backward. Those outside the
    groups of blocks stay gathered."""

    def least_recompute_seconds(self, saved_bytes: float) -> float:
        """Seconds of recompute, over all units, that save so many bytes of a microbatch at least."""
        if saved_bytes <= 0:
            return 0.0
        return max(float(np.interp(saved_bytes, *curve)) for curve in self._recompute_curves)

    @cached_property
    def _recompute_curves(self) -> list[tuple[Row, Row]]:
        """Of launches and of kernels: a stage takes the longer of both sums, so each of them bounds it."""
        rows = [self.recompute_launch, self.recompute_kernel]
        if self.is_cpu:
            rows = [{mode: rows[0][mode] + rows[1][mode] for mode in MODES}]
        saved = {mode: np.diff(self.kept["none"] - self.kept[mode]) for mode in MODES}
        inner = {mode: self.inner_backward[mode] - self.inner_backward["none"] for mode in MODES}
        return [recompute_curve(saved, {mode: np.diff(row[mode] + inner[mode]) for mode in MODES}) for row in rows]

    @cached_property
    def divisions(self) -> tuple[tuple[int, float, float], ...]:
        """For every size of message between units: how many of them are no larger, the size, and the seconds of the heaviest row of
        units that a stage holds whole where no larger message is sent."""
        found = []
        for size in np.unique(self.sent):
            between = np.flatnonzero(self.sent <= size) + 1
            begins, ends = np.array([0, *between]), np.array([*between, self.num_units])
            rows = self.forward(begins, ends) + self.backward(begins, ends)
            found.append((len(between), float(size), float(rows.max())))
        return tuple(found)

    @cached_property
    def alone(self) -> tuple[Places, Places]:
        """Every unit as a row of its own."""
        places: Places = np.arange(self.num_units + 1, dtype=np.int64)
        return places[:-1], places[1:]

    @cached_property
    def unit_seconds(self) -> Row:
        """Forward and backward of each unit, as a stage of its own."""
        return self.forward(*self.alone) + self.backward(*self.alone)

    @cached_property
    def unit_sums(self) -> list[float]:
        """Prefix sums of these."""
        return [0.0, *(float(seconds) for seconds in np.cumsum(self.unit_seconds))]

    @cached_property
    def known_cuts(self) -> dict[tuple[object, ...], tuple[int, ...]]:
        """The fastest cuts found so far, by schedule (cuts/played_cuts.py)."""
        return {}

    @cached_property
    def unit_kept(self) -> Row:
        """Bytes each unit keeps under full recompute."""
        return np.diff(self.kept["full"])

    @cached_in_value
    def beside(self, bytes_each: BlockBytes, *, recomputed: bool) -> Beside:
        """The fullest of three moments of each unit, under the recompute mode that needs least: forward of its last block, backward
        of this block, and the reduction of a block's gradients. In the last one the unit's own activations are gone.

        recomputed: whether everything is. What is not kept is computed again before backward, so recompute saves little on the unit
        that runs."""
        kept = {mode: np.diff(row) for mode, row in self.kept.items()}
        gathered = bytes_each.gathered * self.last_elements
        most_kept = np.max(list(kept.values()), axis=0)
        found = []
        for mode in MODES:
            made = bytes_each.gradient * self.made_shares[mode] * self.last_elements
            moments = (
                2 * gathered - kept[mode],  # flat, too
                self.peaks[mode] + gathered + made,
                bytes_each.reduced * self.reduced_elements - kept[mode],
            )
            found.append(np.max(moments, axis=0) + (kept[mode] - self.unit_kept if recomputed else 0.0))
        by_unit = np.asarray(np.min(found, axis=0))
        behind = np.cumsum((self.unit_kept if recomputed else most_kept)[::-1])[::-1]
        return Beside(by_unit, float((by_unit - np.append(behind[1:], 0.0)).max()))

    @cached_in_value
    def inside(self, bytes_each: BlockBytes) -> Row:
        """Bytes that a stage of two units or more needs in addition to what is kept, by its last unit: when backward of the unit
        before begins, the last one's activations are gone, and its gradients are being reduced."""
        found = np.full(self.num_units, np.inf)
        for mode in MODES:
            kept, last = np.diff(self.kept[mode]), self.last_elements
            before = self.peaks[mode] + (bytes_each.gathered + bytes_each.gradient * self.made_shares[mode]) * last
            behind = bytes_each.reduced * np.minimum(self.reduced_elements, last) - kept
            found[1:] = np.minimum(found[1:], before[:-1] + behind[1:])
        found[0] = -np.inf
        return found

    @cached_property
    def unit_elements(self) -> tuple[Row, Row]:
        """Elements of each unit, and of its experts."""
        return np.diff(self.elements), np.diff(self.expert_elements)

    @cached_property
    def all_kept(self) -> dict[str, float]:
        """Bytes all units keep, by recompute mode."""
        return {mode: float(row[-1]) for mode, row in self.kept.items()}

    @cached_property
    def main_units(self) -> list[int]:
        """The units of the kind with most work, without the ends."""
        columns = np.stack([self.unit_seconds, *(np.diff(self.kept[mode]) for mode in MODES), *self.unit_elements])
        kinds: dict[tuple[str, ...], list[int]] = {}  # equal but for the rounding of prefix sums
        for unit in range(1, self.num_units - 1):
            kinds.setdefault(tuple(f"{value:.6g}" for value in columns[:, unit]), []).append(unit)
        return max(kinds.values(), key=lambda units: len(units) * float(self.unit_seconds[units[0]]), default=[])

    @cached_in_value
    def likeness(self, mode: str) -> float:
        """The least that a unit keeps over the most, without the ends."""
        kept = np.diff(self.kept[mode])[1:-1]
        return float(kept.min() / kept.max()) if len(kept) and kept.max() > 0 else 1.0

    @property
    def num_units(self) -> int:
        return len(self.elements) - 1

    def forward(self, begin: Places | int, end: Places | int) -> Row:
        own = self._seconds(self.forward_launch, self.forward_kernel, begin, end)
        return own + self.inner_forward[end] - self.inner_forward[begin]

    def backward(self, begin: Places | int, end: Places | int, mode: str = "none") -> Row:
        """Seconds of backward, with the recompute of all these units under the mode."""
        own = self._seconds(self.backward_launch, self.backward_kernel, begin, end)
        again = self._seconds(self.recompute_launch[mode], self.recompute_kernel[mode], begin, end)
        inner = self.inner_backward[mode]
        return own + again + inner[end] - inner[begin]

    def kept_by(self, begin: Places | int, end: Places | int, mode: str) -> Row:
        return self.kept[mode][end] - self.kept[mode][begin]

    def _seconds(self, launch: Row, kernel: Row, begin: Places | int, end: Places | int) -> Row:
        launches, kernels = launch[end] - launch[begin], kernel[end] - kernel[begin]
        return np.asarray(launches + kernels if self.is_cpu else np.maximum(launches, kernels))


@dataclass(frozen=True)
class Divided:
    """The units under one division of the model, whatever the microbatch."""

    local_blocks: dict[str, LocalBlock]
    passes: tuple[StagePasses, ...]
    elements: tuple[list[float], list[float]]
    last: list[float]
    """Elements that each unit's last block trains."""
    reduced: list[float]
    regathered: list[float]
    unlike: tuple[int, ...]
    """The first unit of every kind. Units with the same work are costed once."""
    kinds: Places
    """For every unit, the position in `unlike` of the unit it equals."""


def divide_units(
    problem: Problem, graph: Graph, plan: Plan, microbatch: Microbatch, trained: Iterable[Trained]
) -> Divided:
    """plan: one stage a unit."""
    passes = passes_by_stage(graph, plan)
    costs = StageCosts(graph, plan, problem.cluster, problem.recipe, microbatch)
    first: dict[object, int] = {}
    repeated = set(graph.repeated_blocks)
    forms = [
        (costs.form(number, one), tuple(segment.block in repeated for segment in one.forward))
        for number, one in enumerate(passes)
    ]
    for number, form in enumerate(forms):
        first.setdefault(form, number)
    unlike = tuple(first.values())
    kinds = np.array([unlike.index(first[form]) for form in forms], dtype=np.int64)
    elements = elements_of(trained, len(passes), plan.mesh, split_dims(graph, plan))
    groups = [[elements.by_group.get(block, 0.0) for block in blocks] for blocks in plan.blocks_by_stage]
    whole = [max(1.0, dense + expert) for dense, expert in zip(elements.dense, elements.expert, strict=True)]
    return Divided(
        local_blocks=microbatch.local_blocks,
        passes=passes,
        elements=(elements.dense, elements.expert),
        last=[elements.by_group.get(one.backward[0].block, 0.0) if one.backward else 0.0 for one in passes],
        reduced=[max(unit) for unit in groups],
        regathered=[min(1.0, sum(own) / every) for own, every in zip(groups, whole, strict=True)],
        unlike=unlike,
        kinds=kinds,
    )


def make_table(problem: Problem, graph: Graph, plan: Plan, divided: Divided, microbatch: Microbatch) -> UnitTable:
    """plan: one stage a unit, nothing recomputed; its mesh, microbatch and sharding count."""
    by_mode = {
        mode: _Columns(problem, graph, plan, divided, microbatch, _modes(problem, graph, mode)) for mode in MODES
    }
    columns = {mode: seen.by_mode() for mode, seen in by_mode.items()}
    sent = [sent_bytes(divided.passes[number], plan, divided.local_blocks, problem.recipe) for number in divided.unlike]
    dense, expert = divided.elements
    return UnitTable(
        is_cpu=problem.cluster.device.kind == "cpu",
        peaks={mode: columns[mode].pop("peak") for mode in MODES},
        sent=np.array(sent, dtype=np.float64)[divided.kinds][:-1],
        elements=_sums(dense),
        expert_elements=_sums(expert),
        made_shares={mode: columns[mode].pop("made_share") for mode in MODES},
        last_elements=np.array(divided.last),
        reduced_elements=np.array(divided.reduced),
        regathered_shares=np.array(divided.regathered),
        **{name: _sums(values) for name, values in by_mode["none"].shared().items()},  # type: ignore[arg-type]
        **{name: {mode: _sums(columns[mode][name]) for mode in MODES} for name in columns["none"]},  # type: ignore[arg-type]
    )


def _modes(problem: Problem, graph: Graph, mode: str) -> dict[str, ActivationMode]:
    """Every repeated block → this mode."""
    if mode == "none":
        return {}
    again: ActivationMode = problem.recipe.system.selective if mode == "selective" else "full"
    return dict.fromkeys(graph.repeated_blocks, again)


def _sums(values: Row | list[float]) -> Row:
    return np.concatenate(([0.0], np.cumsum(values)))


class _Columns:
    """The columns of the table under one recompute mode."""

    def __init__(
        self,
        problem: Problem,
        graph: Graph,
        plan: Plan,
        divided: Divided,
        microbatch: Microbatch,
        modes: dict[str, ActivationMode],
    ) -> None:
        recipe, passes = problem.recipe, divided.passes
        self.divided = divided
        self.costs = StageCosts(graph, plan, problem.cluster, recipe, microbatch, modes=modes)
        self.memory = MemoryCost(
            plan, recipe, divided.local_blocks, passes, _no_rank_state, microbatch.footprints, modes=modes
        )

    def by_mode(self) -> dict[str, Row]:
        found = []
        for number in self.divided.unlike:
            one = self.divided.passes[number]
            again = self.costs.recompute_work(one)
            begin = self.memory.begin_of_backward(number)
            memory = self.memory.own_kept(number), begin.peak, 1 - begin.pending_gradient_share
            found.append((again.launch, again.kernel, self.costs.inner_backward(one), *memory))
        names = ("recompute_launch", "recompute_kernel", "inner_backward", "kept", "peak", "made_share")
        return self._of_all(found, names)

    def shared(self) -> dict[str, Row]:
        found, costs = [], self.costs
        for number in self.divided.unlike:
            one = self.divided.passes[number]
            forward, backward = costs.work(one.forward), costs.work(one.backward)
            work = (forward.launch, forward.kernel, backward.launch, backward.kernel)
            found.append((*work, costs.inner_forward(one), costs.weights(one.backward)))
        names = ("forward_launch", "forward_kernel", "backward_launch", "backward_kernel", "inner_forward", "weights")
        return self._of_all(found, names)

    def _of_all(self, found: Sequence[tuple[float, ...]], names: tuple[str, ...]) -> dict[str, Row]:
        """Values of all units, from the values of one unit of every kind."""
        values = np.array(found, dtype=np.float64)[self.divided.kinds]
        return {name: values[:, place] for place, name in enumerate(names)}


def _no_rank_state(coordinate: int) -> RankState:
    raise NotImplementedError("a table of units asks for what microbatches keep, not for the state of ranks")
