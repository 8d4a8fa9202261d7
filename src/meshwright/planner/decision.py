"""The plan of a run: read from a file, searched, or plain; with what it promises."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from meshwright.core.cluster import Cluster, Link
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph, Precision
from meshwright.core.plan import Plan
from meshwright.core.result import SearchResult
from meshwright.core.run.trace import Forecast
from meshwright.core.units import format_bytes
from meshwright.cost.estimate import estimate
from meshwright.cost.forecast import forecast
from meshwright.planner.estimate import check_made_for
from meshwright.planner.plan import Limits, PlanQuestion, graph_run_by
from meshwright.planner.shardings import with_legal_sharding
from meshwright.planner.subject import NamedModel
from meshwright.rules.limits import check_runs
from meshwright.rules.plain_plan import count_microbatches, plain_mesh, plain_plan, share_of_batch
from meshwright.training.settings import Settings


@dataclass(frozen=True)
class Decision:
    """A plan, what it promises, and how it was chosen."""

    plan: Plan
    estimate: Estimate
    result: SearchResult | None
    forecast: Forecast | None = None


def decide(settings: Settings, graphs: tuple[Graph, Graph | None], cluster: Cluster, world: int | None) -> Decision:
    """The plan of a run: read, searched, or plain. `graphs`: the model as replicas run it, and as sharded plans do."""
    from meshwright.training.optimizers import recipe_of

    recipe, result = recipe_of(settings), None
    if settings.plan_file is None and settings.planner == "search":
        limits = Limits(devices=world, recipe=recipe)
        subject = NamedModel(settings.model)
        result = PlanQuestion(subject, *graphs, cluster, settings.plan, settings.memory_bytes, limits).answer()
        plan, promise = result.plan, result.estimate
    else:
        plan = _given(settings, graphs[0], cluster, world)
        check_runs(plan)
        promise = estimate(graph_run_by(plan, *graphs), plan, cluster, recipe, settings.memory_bytes)
        check_fits(promise)
    return Decision(plan, promise, result, forecast(graph_run_by(plan, *graphs), plan, cluster, recipe))


def _given(settings: Settings, graph: Graph, cluster: Cluster, world: int | None) -> Plan:
    """The plan of a file, or the request with plain defaults for the rest."""
    if settings.plan_file is None:
        plain = plain_plan(settings.plan, graph, world or cluster.num_devices, cluster.hash)
        return with_legal_sharding(plain, settings.model)
    plan = Plan.load(settings.plan_file)
    check_made_for(plan, graph, settings.plan_file)
    check_world(plan, world, settings.plan_file)
    return plan


def check_world(plan: Plan, nproc: int | None, name: str) -> None:
    if nproc not in (None, plan.world):
        raise PlanError(f"{name} is for {plan.world} ranks, but {nproc} were asked for: use --nproc {plan.world}")


def check_fits(promise: Estimate) -> None:
    if not promise.fits:
        over = promise.needed_bytes - promise.budget_bytes
        raise InfeasibleError(
            f"the plan needs {format_bytes(promise.needed_bytes)} per device, {format_bytes(over)} more "
            f'than the budget of {format_bytes(promise.budget_bytes)}: use planner = "search", --zero, --recompute full or a '
            "smaller --microbatch"
        )


def with_host_link(cluster: Cluster, settings: Settings) -> Cluster:
    """The cluster as the run will see it: a CPU's link to its host is as slow as the settings make it."""
    if settings.host_link is None or cluster.device.kind != "cpu":
        return cluster
    latency = cluster.host_link.latency_seconds if cluster.host_link else None
    link = Link(bytes_per_second=settings.host_link, latency_seconds=latency or 0.0, origin="assumed")
    return msgspec.structs.replace(cluster, host_link=link)


def check_batch(settings: Settings) -> None:
    """A batch that cannot be divided is refused before anything is measured."""
    wish = settings.plan
    if settings.plan_file is None and settings.nproc is not None and wish.global_batch is not None:
        dp = plain_mesh(wish, settings.nproc).dp
        count_microbatches(wish.global_batch, dp, wish.microbatch or share_of_batch(wish.global_batch, dp))


def precision_of_run(settings: Settings) -> Precision:
    """Known before the plan: the model is captured in it."""
    return Plan.load(settings.plan_file).precision if settings.plan_file else settings.plan.precision or "fp32"


def world_of_run(settings: Settings) -> int | None:
    """How many ranks were asked for: by number, or by a plan file."""
    if settings.nproc is not None or settings.plan_file is None:
        return settings.nproc
    return Plan.load(settings.plan_file).world
