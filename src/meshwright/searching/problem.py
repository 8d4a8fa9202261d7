"""A Problem: what is searched for, on what, within which limits. Every method of search gets one and returns an Outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.legal import Key, LegalSharding
from meshwright.core.plan import Offload, Plan, Stage
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchProgress
from meshwright.cost.estimate import estimate
from meshwright.rules.limits import not_yet
from meshwright.rules.stages import Units, most_stages, units_of

OffloadKind = Literal["none", "optimizer", "parameters"]
OFFLOADED: tuple[OffloadKind, ...] = ("optimizer", "parameters")
SAMPLES_PER_DEVICE = 8
"""Global batch per device where nobody gave one."""


@dataclass(frozen=True)
class Problem:
    graph: Graph
    cluster: Cluster
    request: PlanRequest = field(default_factory=PlanRequest)
    recipe: Recipe = field(default_factory=Recipe)
    budget_bytes: int | None = None
    """Per device; without it, all the device has."""
    world: int | None = None
    """How many ranks; without it, fewer devices than there are may be used."""
    other_casting: Graph | None = None
    """The same model as the plans that reach 16 bits in the other way run it; without it, all are costed alike."""
    legal: tuple[LegalSharding, ...] = ()
    """What the runtime has answered so far."""
    prefer_fastest: bool = False
    """Whether the fastest is taken even where a simpler plan is as fast within the estimate's error."""
    offload_asked: bool | None = None
    """A part of a search fixes more than the user asked for. This says whether the user fixed what is offloaded; without it, the
    request does."""
    watch: Callable[[SearchProgress], None] | None = field(default=None, compare=False, repr=False)
    """Told how far the search has come."""
    nothing_fits: tuple[OffloadKind, ...] = ()
    """What may be offloaded though the search does not propose it on this cluster, since nothing fits otherwise."""

    @cached_property
    def devices(self) -> int:
        """How many may be used."""
        devices = self.cluster.num_devices if self.world is None else self.world
        if not 1 <= devices <= self.cluster.num_devices:
            raise PlanError(
                f"{devices} ranks were asked for, but '{self.cluster.name}' has {self.cluster.num_devices} devices"
            )
        return devices

    @cached_property
    def cluster_hash(self) -> str:
        return self.cluster.hash

    @property
    def budget(self) -> int:
        """Bytes a device may use."""
        return self.cluster.device.memory_bytes if self.budget_bytes is None else self.budget_bytes

    @property
    def global_batch(self) -> int:
        return self.request.global_batch or SAMPLES_PER_DEVICE * self.devices

    @cached_property
    def units(self) -> Units:
        """What stages are made of."""
        return units_of(self.graph)

    @cached_property
    def most_stages(self) -> int:
        """How many stages the model can have, with its embedding and head where the request allows them."""
        return most_stages(self.units, self.request.ends)

    @cached_property
    def has_experts(self) -> bool:
        return any(parameter.expert for parameter in self.graph.parameters)

    @cached_property
    def offloads(self) -> tuple[OffloadKind, ...]:
        """What may be offloaded: what the request asks for. Without that, all that can run, where the cluster says how much memory
        hosts have and how fast the link to it is."""
        if self.request.offload is not None:
            return (self.request.offload,)  # type: ignore[return-value]
        apart = self.cluster.device.kind != "cpu"  # a CPU's memory is its host's
        known = apart and self.cluster.host_link is not None and self.cluster.host_memory_bytes is not None
        may_leave = OFFLOADED if known else self.nothing_fits
        return ("none", *(what for what in may_leave if not not_yet(_with_offload(what))))

    @property
    def of_one_device(self) -> Problem | None:
        """The same problem on one device; None where a device alone is like one of many, or where more than one must be used."""
        request = self.request
        if (
            self.world not in (None, 1)
            or self.cluster.device.alone is None
            or any((degree or 1) > 1 for degree in request.degrees.values())
        ):
            return None
        asked = msgspec.structs.replace(request, global_batch=self.global_batch)
        return replace(self, cluster=self.cluster.seen_by(1), request=asked, world=1)

    @property
    def asks_for_offload(self) -> bool:
        return self.request.offload is not None if self.offload_asked is None else self.offload_asked

    def hosts_hold(self, host_bytes: int) -> bool:
        """Whether the hosts have memory for what is offloaded. A user who asks for an offload is shown what it would need."""
        room = self.cluster.host_memory_bytes
        free = room is None or self.asks_for_offload or self.cluster.device.kind == "cpu"
        return free or host_bytes <= room  # type: ignore[operator]

    def answer(self, key: Key) -> LegalSharding | None:
        """What the runtime answered for these degrees, where it was asked."""
        return next((answer for answer in reversed(self.legal) if answer.key == key), None)

    def graph_of(self, plan: Plan) -> Graph:
        """The model as the plan runs it."""
        other = self.other_casting
        return other if other is not None and other.casting == plan.casting else self.graph

    def cost(self, plan: Plan) -> Estimate:
        return estimate(self.graph_of(plan), plan, self.cluster, self.recipe, self.budget_bytes)


@dataclass(frozen=True)
class Outcome:
    """What a method found: plans with their estimates, in any order, those that do not fit among them."""

    costed: tuple[tuple[Plan, Estimate], ...]
    num_candidates: int
    """How many plans the method decided on, including those that a bound left out."""
    bound_seconds: float | None = None
    """No plan that was searched but not costed is faster than this; None where the method does not know."""
    left_out: tuple[str, ...] = ()
    """Plans that flags can ask for and that were not searched, in words."""


def _with_offload(what: OffloadKind) -> Plan:
    """The smallest plan that offloads this."""
    stages = (Stage(coordinate=0, blocks=("block",)),)
    return Plan(stages=stages, offload=Offload(what=what), microbatch=1, num_microbatches=1, global_batch=1)


def narrowed(problem: Problem, fixed: Mapping[str, object]) -> Problem | None:
    """The problem with these parts of the request fixed too; None where the request fixes another value."""
    asked = msgspec.structs.asdict(problem.request)
    if any(asked[name] not in (None, value) for name, value in fixed.items()):
        return None
    request = msgspec.structs.replace(problem.request, **fixed)
    return replace(problem, request=request, offload_asked=problem.asks_for_offload)


Method = Callable[[Problem], Outcome]
