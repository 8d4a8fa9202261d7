"""A run that ran out of memory: what was predicted, and the cheapest plans that need less."""

from __future__ import annotations

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.errors import OutOfMemoryError
from meshwright.core.estimate import Estimate
from meshwright.core.result import WayOut
from meshwright.core.units import format_bytes, format_seconds
from meshwright.planner.decision import Decision, precision_of_run
from meshwright.planner.graphs import both_castings
from meshwright.searching.infeasible.suggestions import ways_out
from meshwright.searching.problem import Problem
from meshwright.training.optimizers import recipe_of
from meshwright.training.settings import Settings

LESS = 0.9
"""Of what the plan was predicted to need: a plan that does not need a tenth less may fail as well."""
SHOWN_WAYS = 4


def with_ways_out(
    error: OutOfMemoryError, settings: Settings, decision: Decision, cluster: Cluster
) -> OutOfMemoryError:
    """The same error, with the promise and what to do, each change with its price."""
    estimate = decision.estimate
    lines = [
        str(error),
        f"predicted: {format_bytes(estimate.needed_bytes)} of {format_bytes(estimate.budget_bytes)} per device: "
        f"{_by_category(estimate)}",
    ]
    ways = [
        way
        for way in ways_out_of(settings, decision, cluster)
        if not way.not_yet and way.plan != decision.plan  # a larger budget is no help: there was no more
    ]
    if ways:
        lines.append(f"what needs at least {1 - LESS:.0%} less, the cheapest first:")
        lines += [f"  {_way(way, cluster)}" for way in ways[:SHOWN_WAYS]]
    else:
        lines.append("no change of the plan needs less: use more ranks, or a smaller model")
    return OutOfMemoryError("\n".join(lines))


def _by_category(estimate: Estimate) -> str:
    sizes = msgspec.structs.asdict(estimate.memory_bytes).items()
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in sizes if size)


def _way(way: WayOut, cluster: Cluster) -> str:
    hosts = f", --hosts {way.num_hosts}" if way.num_hosts != cluster.num_hosts else ""
    return (
        f"{way.words}: {format_bytes(way.saved_bytes)} less per device, {way.slower_share:+.0%} time "
        f"({format_seconds(way.estimate.step_seconds)} per step{hosts})"
    )


def ways_out_of(settings: Settings, decision: Decision, cluster: Cluster) -> tuple[WayOut, ...]:
    """Changes of the plan that ran, costed against a budget that it would not have fitted."""
    graph, other = both_castings(settings.model, precision_of_run(settings))
    problem = Problem(
        graph=graph,
        cluster=cluster,
        recipe=recipe_of(settings),
        budget_bytes=round(LESS * decision.estimate.needed_bytes),
        world=decision.plan.world,
        other_casting=other,
    )
    return ways_out(problem, decision.plan, decision.estimate)
