"""One search, as the verbs that search want it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.cluster import Cluster
    from meshwright.core.errors import InfeasibleError
    from meshwright.core.graph import Graph, Precision
    from meshwright.core.legal import LegalSharding
    from meshwright.core.recipe import Recipe
    from meshwright.core.request import PlanRequest
    from meshwright.core.result import SearchResult

COLLECTED_AFTER = 200_000
"""New objects before the collector looks for circles among them: a search makes many, and hardly a circle."""


@dataclass(frozen=True)
class Searching:
    """A model, and how plans for it are searched; on any cluster."""

    graph: Graph
    other_casting: Graph | None
    budget_bytes: int | None = None
    world: int | None = None
    method: str = "joint"
    prefer_fastest: bool = False
    recipe: Recipe | None = None

    def on(self, cluster: Cluster, request: PlanRequest) -> SearchResult:
        from meshwright.cli.shardings import with_legal_sharding
        from meshwright.searching.asking import search_legal
        from meshwright.searching.search import search

        def find(legal: tuple[LegalSharding, ...]) -> SearchResult:
            return search(
                self.graph,
                cluster,
                request,
                recipe=self.recipe,
                budget_bytes=self.budget_bytes,
                world=self.world,
                other_casting=self.other_casting,
                legal=legal,
                method=self.method,
                prefer_fastest=self.prefer_fastest,
            )

        with _seldom_collected():
            return search_legal(find, lambda plan: with_legal_sharding(plan, self.graph.model))


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Graphs and modules stay to the end: a collector that walks them again and again frees nothing."""
    import gc

    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def say_infeasible(error: InfeasibleError, console: Console, cluster: Cluster, as_json: bool) -> None:
    """The nearest miss and the ways out; the error itself is said by whoever catches it."""
    from meshwright.cli.output import print_json
    from meshwright.report.infeasible import infeasible_view

    found = error.found
    if found is None:
        return
    console.print(infeasible_view(found, cluster))
    if as_json:
        miss = {"plan": found.plan, "estimate": found.estimate, "binding": found.binding}
        print_json(
            {
                "fits": False,
                "nearest_miss": miss,
                "ways_out": found.ways_out,
                "num_candidates": found.num_candidates,
            }
        )


def prepare(
    model: str,
    precision: Precision,
    *,
    memory: str | None = None,
    method: str = "joint",
    prefer_fastest: bool = False,
    world: int | None = None,
    recipe: Recipe | None = None,
) -> Searching:
    """The model captured in both castings, and what was said about the search."""
    from meshwright.cli.graphs import both_castings
    from meshwright.cli.wiring import budget_of

    graph, other = both_castings(model, precision)
    return Searching(graph, other, budget_of(memory), world, method, prefer_fastest, recipe)
