"""What every unit of a model costs by itself, in figures of the cost room.

A *unit* is a repeated block with the blocks behind it that do not repeat; the first unit also has those before it. Units are the
smallest stages there are. Each is costed as a stage of its own, in one microbatch:

    seconds          forward, backward and what is recomputed, with communication in every microbatch (inside the blocks;
                     ZeRO's gathers and reductions, where it has them so often)
    send_seconds     what it makes to the next device, one way
    weight_bytes     gradients that its replicas add up once a step
    state_bytes      parameters, gradients, optimizer state, and copies of weights that stay: gathered ones that ZeRO keeps
                     through a step, 16-bit ones that autocast keeps through a forward
    kept_bytes       what a microbatch holds between its forward and its backward
    sent_bytes       what it sends to the next device, which a microbatch holds there too

A stage of several units costs their sum; that leaves out what hides or shows only when they run together, which the estimate
of the finished plan has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Segment
from meshwright.core.names import expand_names
from meshwright.core.pipeline.kinds import in_flight
from meshwright.core.plan import Mesh, Plan, Recompute
from meshwright.cost.communication.links import axis_group, collective_seconds, send_seconds
from meshwright.cost.memory.allocator_slack import usable_bytes
from meshwright.cost.memory.peak_memory import MemoryCost
from meshwright.cost.memory.rank_state import RankState
from meshwright.cost.microbatch import microbatch_of
from meshwright.cost.passes import handed_on_bytes, passes_by_stage, sends_shares, sent_bytes
from meshwright.cost.stages import StageCosts
from meshwright.rules.kinds import cached_in_value
from meshwright.rules.schedules import make_order
from meshwright.searching.methods.builder import Builder
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point


@dataclass(frozen=True)
class Unit:
    seconds: float
    send_seconds: float
    weight_bytes: float
    state_bytes: float
    kept_bytes: float
    sent_bytes: float = 0.0
    working_bytes: float = 0.0
    """What it needs for a moment on top."""


@dataclass(frozen=True)
class Loads:
    units: tuple[Unit, ...]
    usable_bytes: float
    """The largest peak of a device that fits the budget."""

    @property
    def room_bytes(self) -> float:
        """What a device has for state and kept activations: the rest is for what a unit needs for a moment."""
        return self.usable_bytes - max(unit.working_bytes for unit in self.units)

    def fit(self, counts: Sequence[int], num_microbatches: int) -> bool:
        """Whether every stage of a cut has room, stage s with p - s microbatches in flight."""
        start = 0
        for flight, count in zip(in_flight("1f1b", len(counts), num_microbatches, 1), counts, strict=True):
            units = self.units[start : start + count]
            received = self.units[start - 1].sent_bytes if start else 0.0
            held = sum(unit.state_bytes + flight * unit.kept_bytes for unit in units)
            if held + flight * received > self.room_bytes:
                return False
            start += count
        return True


def reduce_seconds(weight_bytes: float, mesh: Mesh, cluster: Cluster) -> float:
    """The replicas of a stage add their gradients up."""
    return collective_seconds("all_reduce", weight_bytes, axis_group(mesh, "dp"), cluster)


def loads_of(builder: Builder, point: Point, rules: tuple[Recompute, ...] = ()) -> Loads:
    """Of all units, in the order of the model, on the groups of a point's mesh."""
    plan = _unit_plan(builder, point, rules)
    problem, mesh = builder.problem, point.shape.mesh
    usable = usable_bytes(problem.budget, mesh, plan.compile, problem.cluster.device)
    return Loads(_UnitCosts(problem, plan).units(mesh), usable)


def _unit_plan(builder: Builder, point: Point, rules: tuple[Recompute, ...]) -> Plan:
    """Every unit a stage; two microbatches where there are several, so that gradients are added up as in the whole step."""
    count = len(builder.problem.units)
    shape = replace(point.shape, pp=count, num_microbatches=min(point.shape.num_microbatches, 2))
    return builder.plan(replace(point, shape=shape, schedule="1f1b", virtual=1), (1,) * count, rules)


class _UnitCosts:
    """Costs the units of one plan; of units that are alike, one."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan, self.graph = problem, plan, problem.graph_of(plan)
        self.microbatch = microbatch_of(self.graph, plan, problem.cluster, problem.recipe)
        self.local_blocks = self.microbatch.local_blocks
        self.passes = passes_by_stage(self.graph, plan)
        self.costs = StageCosts(self.graph, plan, problem.cluster, problem.recipe, self.microbatch)
        self.memory = MemoryCost(plan, problem.recipe, self.local_blocks, self.passes, self._rank_state)
        self.order = make_order("1f1b", len(self.passes), plan.num_microbatches)

    def units(self, mesh: Mesh) -> tuple[Unit, ...]:
        alike: dict[object, Unit] = {}
        found = []
        for number in range(len(self.passes)):
            key = self._work(number)
            if key not in alike:
                alike[key] = self._unit(number)
            sends = {"send_seconds": self._send_seconds(number, mesh), "sent_bytes": self._sent_bytes(number)}
            found.append(replace(alike[key], **sends))
        return tuple(found)

    def _work(self, number: int) -> object:
        """What tells units apart: the passes they run, how they are recomputed, and whether they are at an end."""
        work = tuple(
            (id(self.local_blocks[segment.block]), segment.number, self.costs.modes.get(segment.block))
            for segment in self.passes[number].forward
        )
        return (work, number == 0, number == len(self.passes) - 1)

    def _unit(self, number: int) -> Unit:
        cost, rank_state = self.costs.of(number, self.passes[number]), self._rank_state(number)
        blocks = set(expand_names(self.plan.stages[number].blocks))
        state = rank_state.base.parameters + rank_state.base.optimizer_state + rank_state.gradients(blocks)
        state += rank_state.gathered("") + round(sum(self._copies(one) for one in self.passes[number].forward))
        received = self._sent_bytes(number - 1) if number else 0.0
        kept = self.memory.own_kept(number)
        row = self.order[number][:1] + self.order[number][-1:]  # one microbatch by itself
        order = (*self.order[:number], row, *self.order[number + 1 :])
        peak = self.memory.peak(number, order, self.problem.cluster.device).memory.total
        return Unit(
            seconds=cost.forward_seconds + cost.backward_seconds,
            send_seconds=0.0,
            weight_bytes=rank_state.whole_trainable * rank_state.items.reduced if self.plan.zero < 2 else 0.0,
            state_bytes=state,
            kept_bytes=kept,
            working_bytes=max(0.0, peak - state - kept - received),
        )

    def _copies(self, segment: Segment) -> float:
        """Weights in 16 bits that autocast keeps until forward ends."""
        return self.memory.footprints.of(self.local_blocks[segment.block], segment.block, segment.number).cached

    @cached_in_value
    def _rank_state(self, number: int) -> RankState:
        return RankState(self.graph, self.plan, self.problem.recipe, number)

    def _sent_bytes(self, number: int) -> float:
        """As the next device holds it."""
        copies = 2 if self.problem.recipe.system.copies_received else 1
        return copies * handed_on_bytes(self.passes[number], self.local_blocks, self.plan.microbatch)

    def _send_seconds(self, number: int, mesh: Mesh) -> float:
        """Over the links between the groups of the mesh, which are fewer than the units."""
        plan, problem = self.plan, self.problem
        if mesh.pp == 1 or number + 1 == len(self.passes):
            return 0.0
        size = sent_bytes(self.passes[number], plan, self.local_blocks, problem.recipe)
        seconds = send_seconds(size, axis_group(mesh, "pp"), problem.cluster)
        if sends_shares(plan, problem.recipe):
            seconds += collective_seconds("all_gather", size, axis_group(mesh, "tp"), problem.cluster)
        return seconds
