"""A plan for a model on a cluster: what was fixed is kept, the rest is searched.

ask       finds the model, the cluster and the limits, and refuses what contradicts itself       -> PlanQuestion
answer    searches, and tries the shardings it finds on the model until what the plan says will run
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InputError, check_number
from meshwright.core.graph import Graph, Precision
from meshwright.core.legal import LegalSharding
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchProgress, SearchResult
from meshwright.planner.clusters import LOCAL, Say, asked_cluster, checked_budget, silent
from meshwright.planner.flags import PlanFlags, request_of
from meshwright.planner.subject import Subject, subject_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Limits:
    """The limits of a search beside the plan flags: how many devices, how much memory, and which method."""

    devices: int | None = None
    """Number of devices to use; without it, the search chooses."""
    memory: str | int | None = None
    """Budget per device, in bytes or as people write it; without it, all the device has."""
    search: str = "joint"
    prefer_fastest: bool = False
    """Whether the fastest plan is taken even where a simpler one is as fast within the estimate's error."""
    recipe: Recipe | None = None
    """The optimizer's state and clipping, which training adds to the model."""

    def __post_init__(self) -> None:
        check_number("--devices", self.devices)


NO_LIMITS = Limits()
Watch = Callable[[SearchProgress], None]
COLLECTED_AFTER = 200_000
"""New objects before the collector looks for circles among them: a search makes many, and hardly a circle."""


def plan(
    model: str | nn.Module | Graph,
    cluster: Cluster | str | PathLike[str] = LOCAL,
    *,
    batch: Any = None,
    loss: Any = None,
    count: Any = None,
    hosts: int | None = None,
    nproc: int | None = None,
    devices: int | None = None,
    memory: str | int | None = None,
    search: str = "joint",
    prefer_fastest: bool = False,
    recipe: Recipe | None = None,
    say: Say = silent,
    watch: Watch | None = None,
    **flags: Unpack[PlanFlags],
) -> SearchResult:
    """The best plan for a model on a cluster, as `meshwright plan` prints it.

        mw.plan("gpt:layers=24,hidden=2048,heads=16,seq=1024,vocab=50304", "a100-80g-selene", hosts=2, global_batch=256)
        mw.plan(module, mw.probe(), batch=(inputs, labels), zero=2, precision="bf16")

    model: a name (`meshwright models`), a module with batch=, or a Graph from `mw.capture`, which is planned in the precision it
    was captured in. batch, loss, count: of a module, as for `mw.capture`.
    cluster: a value, a name of the catalogue, a file, or "local": this machine, measured. hosts: how many, where not the
    cluster's own number; nproc: of "local", how many ranks; devices: how many to use. memory: budget per device, like "72GiB".
    search: which method. prefer_fastest: take the fastest plan even where a simpler one is as fast within the estimate's error.
    recipe: what training adds, such as another optimizer. say: takes a line when something takes long. watch: called
    with a SearchProgress, again and again.
    Every plan flag is a keyword and fixes that part: dp, tp, pp, cp, ep, virtual, ends, zero, hybrid, sequence_parallel,
    context, microbatch, global_batch, schedule, recompute, precision, offload, offload_share, offload_moments, offload_delayed,
    compile, sync_batch_norm.

    Raises InfeasibleError, which names what does not fit and by how much.
    """
    subject, request = subject_of(model, batch, loss, count), request_of(flags, plan)
    check_offload(request)
    limits = Limits(devices, memory, search, prefer_fastest, recipe)
    return PlanQuestion.ask(subject, asked_cluster(cluster, hosts, nproc, say), request, limits).answer(watch)


@dataclass(frozen=True)
class PlanQuestion:
    """A model with its graphs, a cluster, and how plans for it are searched."""

    subject: Subject
    graph: Graph
    other_casting: Graph | None
    cluster: Cluster
    request: PlanRequest
    budget_bytes: int | None = None
    limits: Limits = NO_LIMITS

    @classmethod
    def ask(cls, subject: Subject, cluster: Cluster, request: PlanRequest, limits: Limits = NO_LIMITS) -> PlanQuestion:
        """The question with the model captured as the plan will run it."""
        budget = checked_budget(limits.memory, cluster)
        graphs = subject.both_castings(subject.precision(request.precision, plain_precision(cluster)))
        return cls(subject, *graphs, cluster, request, budget, limits)

    def graph_run_by(self, plan: Plan) -> Graph:
        """The graph of the casting that a plan runs."""
        return graph_run_by(plan, self.graph, self.other_casting)

    def answer(self, watch: Watch | None = None) -> SearchResult:
        """watch: called with the progress of the search, again and again."""
        from meshwright.searching.legality import search_legal
        from meshwright.searching.search import search  # numpy and scipy are loaded while the model is captured

        limits = self.limits

        def find(legal: tuple[LegalSharding, ...]) -> SearchResult:
            return search(
                self.graph, self.cluster, self.request, recipe=limits.recipe, budget_bytes=self.budget_bytes,
                world=limits.devices, other_casting=self.other_casting, legal=legal, method=limits.search,
                prefer_fastest=limits.prefer_fastest, watch=watch,
            )  # fmt: skip

        with _seldom_collected():
            return search_legal(find, self.subject.with_legal_sharding)


def graph_run_by(plan: Plan, graph: Graph, other_casting: Graph | None) -> Graph:
    """The graph of the casting that a plan runs."""
    return other_casting if other_casting is not None and other_casting.casting == plan.casting else graph


def plain_precision(cluster: Cluster) -> Precision:
    """The default precision: 16 bits on a device with units for them, fp32 on a CPU."""
    if cluster.device.kind == "cpu":
        return "fp32"
    has_bf16 = "bf16" in cluster.device.peaks or any(rate.dtype == "bf16" for rate in cluster.device.rates)
    return "bf16" if has_bf16 else "fp16"


def check_offload(request: PlanRequest) -> None:
    how = (request.offload_share, request.offload_moments, request.offload_delayed or None)
    if request.offload == "none" and any(answer is not None for answer in how):
        raise InputError("nothing is to be offloaded, but a flag says how: leave --offload-… out, or --no-offload")


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Graphs and modules stay to the end: a collector that walks them again and again frees nothing."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
