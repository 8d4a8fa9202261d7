"""The cost of a plan that is given as a value, as a file, or by plan flags with plain defaults for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Unpack

from meshwright.core.axes import RANK_AXES
from meshwright.core.cluster import Cluster
from meshwright.core.errors import InputError, PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan, casting_of, stores_16_bits
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import check_memory_of_all
from meshwright.cost.estimate import estimate as estimate_plan
from meshwright.planner.clusters import LOCAL, Say, asked_cluster, checked_budget, silent
from meshwright.planner.flags import PlanFlags, request_of
from meshwright.planner.plan import NO_LIMITS, Limits, plain_precision
from meshwright.planner.subject import Subject, subject_of
from meshwright.rules.plain_plan import plain_plan

if TYPE_CHECKING:
    from torch import nn


def estimate(
    model: str | nn.Module | Graph,
    cluster: Cluster | str | PathLike[str] = LOCAL,
    *,
    plan: Plan | str | PathLike[str] | None = None,
    batch: Any = None,
    loss: Any = None,
    count: Any = None,
    hosts: int | None = None,
    nproc: int | None = None,
    devices: int | None = None,
    memory: str | int | None = None,
    recipe: Recipe | None = None,
    say: Say = silent,
    **flags: Unpack[PlanFlags],
) -> Estimate:
    """Step time and memory of a plan, as `meshwright estimate` prints them; nothing is run.

        mw.estimate("gpt:layers=12,hidden=768,heads=12,seq=1024,vocab=50304", "a100-80g-selene", tp=2, global_batch=64)
        mw.estimate(module, cluster, batch=batch, plan="plan.json")

    plan: a whole plan, as a value or a file; without it, the plan flags (keywords, as of `mw.plan`) with plain defaults for the
    rest, on all devices of the cluster. All else as for `mw.plan`.
    """
    subject, request = subject_of(model, batch, loss, count), request_of(flags, estimate)
    found, limits = asked_cluster(cluster, hosts, nproc, say), Limits(devices, memory, recipe=recipe)
    return EstimateQuestion.ask(subject, found, request, plan, limits).answer()


@dataclass(frozen=True)
class EstimateQuestion:
    """A plan that is whole, with the graph it runs and the cluster it would run on."""

    plan: Plan
    graph: Graph
    cluster: Cluster
    budget_bytes: int | None = None
    recipe: Recipe | None = None

    @classmethod
    def ask(
        cls,
        subject: Subject,
        cluster: Cluster,
        request: PlanRequest,
        plan: Plan | str | PathLike[str] | None = None,
        limits: Limits = NO_LIMITS,
    ) -> EstimateQuestion:
        """plan: a whole one; without it, the request with plain defaults for the rest."""
        budget = checked_budget(limits.memory, cluster)
        if plan is None:
            whole, graph = _plain(subject, request, cluster, limits.devices)
        else:
            whole, graph = _given(subject, request, plan)
        check_uses_all(whole, cluster, limits.devices)
        return cls(whole, graph, cluster, budget, limits.recipe)

    def answer(self) -> Estimate:
        check_memory_of_all(self.graph, self.plan, self.cluster)
        return estimate_plan(self.graph, self.plan, self.cluster, self.recipe, budget_bytes=self.budget_bytes)


def check_made_for(plan: Plan, graph: Graph, name: str) -> None:
    """A plan made for another model is refused."""
    if plan.graph and plan.graph != graph.identity:
        raise PlanError(
            f"{name} was made for another model ({plan.model or 'unnamed'}, graph {plan.graph}), not for {graph.model} "
            f"(graph {graph.identity}): plan again"
        )


def given_plan(plan: Plan | str | PathLike[str]) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.load(plan)


def name_of(plan: Plan | str | PathLike[str]) -> str:
    """The name of a given plan in messages."""
    return "the plan" if isinstance(plan, Plan) else fspath(plan)


def check_uses_all(plan: Plan, cluster: Cluster, devices: int | None) -> None:
    """Devices are left idle only where somebody says so."""
    used = " · ".join(f"{axis} {getattr(plan.mesh, axis)}" for axis in RANK_AXES) + f" = {plan.world}"
    if devices is not None and plan.world != devices:
        raise PlanError(f"--devices is {devices}, but the plan uses {used}: make them equal")
    if devices is None and plan.world < cluster.num_devices:
        raise PlanError(
            f"the plan uses {used} of {cluster.num_devices} devices of '{cluster.name}': change a degree or --hosts, or add "
            f"--devices {plan.world} to leave the others idle"
        )


def _given(subject: Subject, request: PlanRequest, plan: Plan | str | PathLike[str]) -> tuple[Plan, Graph]:
    if request != PlanRequest():
        raise InputError("plan= gives a whole plan: leave the plan flags out, or edit the plan")
    whole = given_plan(plan)
    graph = subject.graph(subject.precision(whole.precision, whole.precision), whole.casting)
    check_made_for(whole, graph, name_of(plan))
    return whole, graph


def _plain(subject: Subject, request: PlanRequest, cluster: Cluster, devices: int | None) -> tuple[Plan, Graph]:
    """The model is captured as the plan will run it, which is known from the request."""
    world = _world(request, devices or cluster.num_devices)
    precision = subject.precision(request.precision, plain_precision(cluster))
    stored = stores_16_bits(precision, request.offload or "none", world)
    graph = subject.graph(precision, casting_of(precision, request.zero or 0, stored))
    return subject.with_legal_sharding(plain_plan(request, graph, world, cluster.hash)), graph


def _world(request: PlanRequest, devices: int) -> int:
    """Number of ranks: the product of the degrees where dp is given; otherwise all devices."""
    if request.dp is None:
        return devices
    return prod(request.degrees[axis] or 1 for axis in RANK_AXES)
