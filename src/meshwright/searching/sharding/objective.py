"""The objective of the integer program that shards weights: the seconds of one microbatch through all blocks, minus what split
weights save outside their ops. sharding/program.py states the formula and its symbols."""

from __future__ import annotations

from collections import Counter
from math import inf

from meshwright.core.graph import Graph, Kind, Op, Phase
from meshwright.cost.communication.block_calls import is_whole_lookup
from meshwright.rules.labels import Way
from meshwright.searching.sharding.costs import PHASES, ShardCosts
from meshwright.searching.sharding.integer_program import CONSTANT, Terms, minus, plus
from meshwright.searching.sharding.program import ShardProgram
from meshwright.searching.sharding.units import Unit

PLAIN_SHARE = 1e-9
"""The share of all seconds that splitting a weight must gain, so that of equal shardings the plainest is taken."""
FINE = 1e-4
"""The share of all seconds that is the solver's unit of time."""


class Objective:
    """Adds the objective to a program that has its constraints."""

    def __init__(self, model: ShardProgram, graph: Graph, costs: ShardCosts) -> None:
        self.model, self.costs, self.program = model, costs, model.program
        self.times = Counter((segment.block, segment.number) for segment in graph.timeline)
        self.kernels: dict[Phase, Terms] = {"forward": {}, "backward": {}}
        self.launches: dict[Phase, float] = {"forward": 0.0, "backward": 0.0}
        for number, unit in enumerate(model.units):
            self._add_passes(number, unit)
            self._pay_calls(number, unit)
            self._pay_state(number, unit)
        self._pay_columns()
        self.unit = FINE * (
            sum(self.kernels[phase].get(CONSTANT, 0.0) + self.launches[phase] for phase in PHASES) or 1.0
        )
        for phase in PHASES:
            self._pay_phase(phase)
        self._pay_for_splitting()

    @property
    def _least_gain(self) -> float:
        return PLAIN_SHARE / FINE * self.unit

    def _pay_for_splitting(self) -> None:
        for own in self.model.x:
            for chosen in own.values():
                self.program.pay(chosen, self._least_gain)

    def solve(self) -> tuple[tuple[dict[str, Way], ...], float] | None:
        """The ways of every unit's weights and the seconds they take; None where no sharding is legal."""
        solved = self.program.solve(self.unit)
        if solved is None:
            return None
        values, seconds = solved
        ways = tuple(self.model.chosen(number, values) for number in range(len(self.model.units)))
        return ways, seconds - self._least_gain * sum(map(len, ways))

    # ------------------------------------------------------------ compute

    def _add_passes(self, number: int, unit: Unit) -> None:
        """Adds the seconds of every op, times the number of times that the timeline runs its pass."""
        fused = self.costs.is_fused(unit.blocks[0])
        for place, one in enumerate(unit.kind.passes):
            times = sum(self.times[block, place] for block in unit.blocks)
            if not times:
                continue
            alone, groups = list(one.op_range), set[int]()
            num_launched = sum(unit.kind.ops[op].count for op in alone)
            if fused:
                known = self.costs.local_block(unit.kind, "whole", split=False).fused
                groups = {known.group_of[op] for op in alone if op in known.group_of}
                alone = [op for op in alone if op not in known.group_of]
                num_launched = len(alone) + len(groups)
            parts = [self._op_seconds(number, unit.kind, op) for op in alone]
            parts += [self._group_seconds(number, unit.kind, group) for group in sorted(groups)]
            kernel = plus(*parts, factor=times)
            launch = times * self.costs.launch_seconds(one.phase, num_launched, fused=fused)
            if self.costs.recipe.system.blocking_launches:  # there and back, and nothing runs meanwhile
                kernel, launch = plus(kernel, {CONSTANT: 2 * launch}), 0.0
            self.kernels[one.phase] = plus(self.kernels[one.phase], kernel)
            self.launches[one.phase] += launch

    def _op_seconds(self, number: int, kind: Kind, op: int) -> Terms:
        """whole + (split - whole) s + (summed - whole) (u - s)"""
        label, work = self.model.labels[number, op], self.model.work[number, op]
        whole = self.costs.op_seconds(kind, op, "whole", split=False)
        found: Terms = {CONSTANT: whole}
        if label:
            found = plus(found, plus(label, factor=self.costs.op_seconds(kind, op, "split", split=True) - whole))
        summed = minus(work, label)
        if summed:
            found = plus(found, plus(summed, factor=self.costs.op_seconds(kind, op, "whole", split=True) - whole))
        return found

    def _group_seconds(self, number: int, kind: Kind, group: int) -> Terms:
        """A group of fused ops is split where all its ops are."""
        whole = self.costs.group_seconds(kind, group, split=False)
        members = self.costs.local_block(kind, "whole", split=False).fused.members[group]
        work = [self.model.work[number, op] for op in members]
        if not all(work):
            return {CONSTANT: whole}
        split = self.program.variable()
        for terms in work:
            self.program.at_least(terms, split)
        return plus({CONSTANT: whole}, plus(split, factor=self.costs.group_seconds(kind, group, split=True) - whole))

    def _pay_phase(self, phase: Phase) -> None:
        """A CPU runs launches and kernels one after the other. The host of a GPU runs ahead, so the longer of both counts."""
        kernels, launches = self.kernels[phase], self.launches[phase]
        if self.costs.cluster.device.kind == "cpu":
            self.program.pay(plus(kernels, {CONSTANT: launches}), 1.0)
            return
        seconds = self.program.variable(most=inf)
        self.program.at_least(seconds, plus(kernels, factor=1 / self.unit))
        self.program.at_least(seconds, {CONSTANT: launches / self.unit})
        self.program.pay(seconds, self.unit)

    # ------------------------------------------------------------ communication

    def _pay_calls(self, number: int, unit: Unit) -> None:
        """Pays for partial sums, and for the collectives of the loss, of lookups and of attention along cp."""
        num_products = 0
        for place, op in enumerate(unit.kind.ops):
            if op.phase != "forward":
                continue
            name = unit.weights.get(place)
            summed = self.model.way(number, name, "row", "table")
            if summed:
                self.program.pay(summed, len(unit.blocks) * self.costs.summed_seconds(op))
            is_product = op.kind == "matmul" and op.region == "attention"
            if _has_calls(op):
                second = is_product and num_products % 2 == 1
                whole = self.costs.own_seconds(op, "whole", is_second_product=second)
                split = self.costs.own_seconds(op, "split", is_second_product=second)
                self.program.pay({CONSTANT: 1.0}, len(unit.blocks) * whole)
                self.program.pay(self.model.labels[number, place], len(unit.blocks) * (split - whole))
            num_products += is_product

    def _pay_columns(self) -> None:
        """The gradient of a tensor is added up once for all weights split by outputs that read it."""
        for (number, _), readers in self.model.columns.items():
            seconds = len(self.model.units[number].blocks) * self.costs.read_seconds(readers[0][0])
            self.program.pay(self.program.either([chosen for _, chosen in readers]), seconds)

    # ------------------------------------------------------------ state

    def _pay_state(self, number: int, unit: Unit) -> None:
        """Pays for the state of weights, of their biases, and of parameters that are split with their channels."""
        lookups = {op.inputs[0] for op in unit.kind.ops if op.phase == "forward" and is_whole_lookup(op)}
        cut = self._cut_parameters(number, unit)
        for name, parameter in unit.parameters.items():
            whole, split = (
                self.costs.state_seconds(parameter, split=split, is_lookup=name in lookups) for split in (False, True)
            )
            self.program.pay({CONSTANT: 1.0}, len(unit.blocks) * whole)
            self.program.pay(cut.get(name, {}), len(unit.blocks) * (split - whole))
        for place, op in enumerate(unit.kind.ops):
            self.program.pay(self.model.labels[number, place], -len(unit.blocks) * self.costs.kept_gain(op))

    def _cut_parameters(self, number: int, unit: Unit) -> dict[str, Terms]:
        """Parameter → 1 where it is split: a weight in any way, a bias with a column-split weight, others with their channels."""
        found: dict[str, Terms] = {}
        for place, op in enumerate(unit.kind.ops):
            if op.phase != "forward" or place in unit.copies:
                continue
            weight, follows = unit.weights.get(place), "batch_norm" in op.name or op.kind == "convolution"
            for parameter in filter(None, map(unit.parameter_of, op.inputs)):
                name = parameter.own_name
                if weight is None:
                    found.setdefault(name, self.model.labels[number, place] if follows else {})
                else:
                    found.setdefault(name, self.model.way(number, weight, *(() if name == weight else ("column",))))
        return found


def _has_calls(op: Op) -> bool:
    """Ops that may call collectives of their own."""
    is_attention = op.kind == "attention" or (op.kind == "matmul" and op.region == "attention")
    return is_attention or "softmax" in op.name or op.name.startswith("nll_loss") or op.name == "embedding"
