"""The plan of a run: read from a file, searched, or plain; with what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.core.cluster import Cluster
    from meshwright.core.estimate import Estimate
    from meshwright.core.graph import Graph, Precision
    from meshwright.core.plan import Plan
    from meshwright.core.result import SearchResult
    from meshwright.core.run.trace import Forecast
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
    if settings.plan_file is None and settings.planner == "search":
        return _searched(settings, graphs, cluster, world)
    return _costed(_given(settings, graphs[0], cluster, world), settings, graphs, cluster)


def _searched(settings: Settings, graphs: tuple[Graph, Graph | None], cluster: Cluster, world: int | None) -> Decision:
    from meshwright.cost.forecast import forecast
    from meshwright.planner.limits import Limits
    from meshwright.planner.plan import PlanQuestion
    from meshwright.planner.subject import NamedModel
    from meshwright.training.optimizers import recipe_of

    recipe = recipe_of(settings)
    limits = Limits(devices=world, recipe=recipe)
    asked = PlanQuestion(NamedModel(settings.model), *graphs, cluster, settings.plan, settings.memory_bytes, limits)
    result = asked.answer()
    planned = forecast(asked.graph_run_by(result.plan), result.plan, cluster, recipe)
    return Decision(result.plan, result.estimate, result, planned)


def _given(settings: Settings, graph: Graph, cluster: Cluster, world: int | None) -> Plan:
    """Of a file, or as asked with plain defaults for the rest."""
    from meshwright.core.errors import PlanError
    from meshwright.core.plan import Plan
    from meshwright.planner.estimate import check_made_for
    from meshwright.planner.shardings import with_legal_sharding
    from meshwright.rules.plain_plan import plain_plan

    if settings.plan_file is None:
        plain = plain_plan(settings.plan, graph, world or cluster.num_devices, cluster.hash)
        return with_legal_sharding(plain, settings.model)
    plan = Plan.load(settings.plan_file)
    check_made_for(plan, graph, settings.plan_file)
    if world is not None and plan.world != world:
        raise PlanError(
            f"{settings.plan_file} is for {plan.world} ranks, but {world} were asked for: use --nproc {plan.world}"
        )
    return plan


def _costed(plan: Plan, settings: Settings, graphs: tuple[Graph, Graph | None], cluster: Cluster) -> Decision:
    """Refused where it cannot run, or does not fit."""
    from meshwright.core.errors import InfeasibleError
    from meshwright.core.units import format_bytes
    from meshwright.cost.estimate import estimate
    from meshwright.cost.forecast import forecast
    from meshwright.planner.plan import graph_run_by
    from meshwright.rules.limits import check_runs
    from meshwright.training.optimizers import recipe_of

    check_runs(plan)
    recipe = recipe_of(settings)
    graph = graph_run_by(plan, *graphs)
    found = estimate(graph, plan, cluster, recipe, settings.memory_bytes)
    if not found.fits:
        over = found.needed_bytes - found.budget_bytes
        raise InfeasibleError(
            f"the plan needs {format_bytes(found.needed_bytes)} per device, {format_bytes(over)} more "
            f'than the budget of {format_bytes(found.budget_bytes)}: use planner = "search", --zero, --recompute full or a '
            "smaller --microbatch"
        )
    return Decision(plan, found, None, forecast(graph, plan, cluster, recipe))


def with_host_link(cluster: Cluster, settings: Settings) -> Cluster:
    """The cluster as the run will see it: a CPU's link to its host is as slow as the settings make it."""
    import msgspec

    from meshwright.core.cluster import Link

    if settings.host_link is None or cluster.device.kind != "cpu":
        return cluster
    latency = cluster.host_link.latency_seconds if cluster.host_link else None
    link = Link(bytes_per_second=settings.host_link, latency_seconds=latency or 0.0, origin="assumed")
    return msgspec.structs.replace(cluster, host_link=link)


def check_batch(settings: Settings) -> None:
    """A batch that cannot be divided is refused before anything is measured."""
    from meshwright.rules.plain_plan import count_microbatches, plain_mesh, share_of_batch

    wish = settings.plan
    if settings.plan_file is None and settings.nproc is not None and wish.global_batch is not None:
        dp = plain_mesh(wish, settings.nproc).dp
        count_microbatches(wish.global_batch, dp, wish.microbatch or share_of_batch(wish.global_batch, dp))


def precision_of_run(settings: Settings) -> Precision:
    """Known before the plan: the model is captured in it."""
    from meshwright.core.plan import Plan

    return Plan.load(settings.plan_file).precision if settings.plan_file else settings.plan.precision or "fp32"


def world_of_run(settings: Settings) -> int | None:
    """How many ranks were asked for: by number, or by a plan file."""
    from meshwright.core.plan import Plan

    if settings.nproc is not None or settings.plan_file is None:
        return settings.nproc
    return Plan.load(settings.plan_file).world
