"""The best plan at each of several cluster sizes or batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, InputError, PlanError
from meshwright.core.graph import Graph
from meshwright.core.recipe import Recipe
from meshwright.planner.clusters import LOCAL, Say, asked_cluster, silent
from meshwright.planner.flags import SweptFlags, request_of
from meshwright.planner.plan import Limits, PlanQuestion, check_offload
from meshwright.planner.subject import subject_of
from meshwright.report.sweep import Sweep, SweepPoint
from meshwright.searching.problem import SAMPLES_PER_DEVICE

if TYPE_CHECKING:
    from torch import nn

Watch = Callable[[int, int, Cluster], None]
"""Told before each point: its number, how many there are, and its cluster."""


def sweep(
    model: str | nn.Module | Graph,
    cluster: Cluster | str | PathLike[str] = LOCAL,
    *,
    hosts: int | Sequence[int] | None = None,
    global_batch: int | Sequence[int] | None = None,
    price: float | None = None,
    batch: Any = None,
    loss: Any = None,
    count: Any = None,
    memory: str | int | None = None,
    search: str = "joint",
    prefer_fastest: bool = False,
    recipe: Recipe | None = None,
    say: Say = silent,
    watch: Watch | None = None,
    **flags: Unpack[SweptFlags],
) -> Sweep:
    """The best plan at each of several numbers of hosts, or of several global batches, as `meshwright sweep` prints it.

        mw.sweep("gpt:layers=24,hidden=2048,heads=16,seq=1024,vocab=50304", "a100-80g-selene", hosts=[1, 2, 4], price=2.0)

    hosts, global_batch: a number, or a list for one of the two. price: money per device-hour. watch: told before each point.
    All else as for `mw.plan`. A point where nothing fits has no plan, and says why.
    """
    subject, request = subject_of(model, batch, loss, count), request_of(flags, sweep)
    check_offload(request)
    if price is not None and not 0 <= price < inf:
        raise InputError(f"--price is {price}: give money per device-hour, 0 or more")
    sizes, batches = _listed(hosts), _listed(global_batch)
    if len(sizes) > 1 and len(batches) > 1:
        raise InputError("--hosts and --global-batch are both lists: sweep one, and give one number for the other")
    if cluster == LOCAL and sizes not in ((), (1,)):
        raise InputError("'local' is this machine alone: sweep --global-batch, or name a cluster for --hosts")
    clusters = [asked_cluster(cluster, size, say=say) for size in sizes or (None,)]
    first = PlanQuestion.ask(subject, clusters[0], request, Limits(None, memory, search, prefer_fastest, recipe))
    asked = [
        replace(first, cluster=found, request=msgspec.structs.replace(request, global_batch=size))
        for found in clusters
        for size in batches or (None,)
    ]
    points = []
    for number, question in enumerate(asked, start=1):
        if watch is not None:
            watch(number, len(asked), question.cluster)
        points.append(_best_at(question))
    return Sweep(model=first.graph.model, cluster=first.cluster.name, points=tuple(points), price=price)


def _best_at(asked: PlanQuestion) -> SweepPoint:
    """The best plan at one point, or why there is none."""
    cluster = asked.cluster
    batch = asked.request.global_batch or SAMPLES_PER_DEVICE * cluster.num_devices
    point = SweepPoint(num_hosts=cluster.num_hosts, num_devices=cluster.num_devices, global_batch=batch)
    try:
        result = replace(asked, request=msgspec.structs.replace(asked.request, global_batch=batch)).answer()
    except InfeasibleError as error:
        return msgspec.structs.replace(point, reason=error.found.binding if error.found else str(error))
    except PlanError as error:
        return msgspec.structs.replace(point, reason=str(error))
    return msgspec.structs.replace(
        point, plan=result.plan, estimate=result.estimate, search_seconds=result.search_seconds
    )


def _listed(numbers: int | Sequence[int] | None) -> tuple[int, ...]:
    if numbers is None:
        return ()
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)
