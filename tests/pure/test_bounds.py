"""Every bound of the search is a bound: no plan below a node is faster than the node says."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from machines import machine, measured_machines
from strategies import quick
from test_experts import GRAPH as EXPERTS
from transformer import transformer_graph

from meshwright.core.cluster import Cluster, Link
from meshwright.core.constants import Constants
from meshwright.core.errors import PlanError, ScheduleError
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.rules.limits import not_yet
from meshwright.searching.cuts.best_cut import best_cut
from meshwright.searching.joint.best_first import BestFirst
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.methods.exhaustive import offloadings, points, recomputes, stage_counts
from meshwright.searching.plan_builder import make_plan
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape, Way, family

MOST_PLANS = 25
ROUNDING = 1e-9

graphs = st.one_of(
    st.builds(
        transformer_graph,
        layers=st.integers(2, 5),
        heads=st.sampled_from([2, 4]),
        vocab=st.sampled_from([64, 4096]),
        attention=st.sampled_from(["fused", "eager"]),
    ),
    st.just(EXPERTS),
)


def by_constants(num_devices: int, bandwidth: float, hosts: int) -> Cluster:
    """A device that is known by constants."""
    cluster = machine(num_devices, hosts=hosts, bytes_per_second=bandwidth, rates=(), constants=Constants())
    device = msgspec.structs.replace(cluster.device, peaks={"fp16": 1e12, "fp32": 5e11}, bytes_per_second=1e11)
    return msgspec.structs.replace(cluster, device=device)


def with_hosts(cluster: Cluster, bandwidth: float) -> Cluster:
    """There is room beside the devices."""
    link = Link(bytes_per_second=bandwidth, latency_seconds=1e-6, origin="assumed")
    return msgspec.structs.replace(cluster, host_link=link, host_memory_bytes=10**10, host_updates_per_second=1e9)


bandwidths = st.sampled_from([1e7, 1e9, 1e11])
clusters = st.builds(
    with_hosts,
    st.one_of(
        measured_machines,
        st.builds(by_constants, st.sampled_from([2, 4]), bandwidths, st.sampled_from([1, 2])),
    ),
    bandwidths,
)


def point_of(plan: Plan) -> Point:
    mesh = plan.mesh
    shape = Shape(
        mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.ep, plan.sequence_parallel, plan.microbatch, plan.num_microbatches,
        plan.compile, plan.context,
    )  # fmt: skip
    return Point(shape, plan.schedule, plan.virtual, plan.zero, plan.hybrid, plan.offload.what)


def bounds_above(found: BestFirst, plan: Plan) -> Iterator[tuple[str, float]]:
    """Of every node on the way to a plan."""
    point, drafts = point_of(plan), found.drafts
    shape, mesh = point.shape, plan.mesh
    yield "world", found._evenly(plan.world, [mesh.tp])
    way = Way(plan.sequence_parallel, plan.compile, plan.context)
    yield "submesh", drafts.tables.device_seconds(mesh.tp, mesh.cp, way) / plan.world
    yield "family", found._family_bound(family(found.problem, mesh, way))
    yield "shape", found._shape_bound(shape)
    bounds = drafts.tables.bounds(shape, sharded=point.casts_ahead)
    assert bounds is not None
    yield "turns", bounds.of_turns(shape, plan.schedule, plan.virtual)
    yield "point", drafts.bound(point) or 0.0
    if point.offload == "parameters":
        return
    room, counts = drafts.room(point), [0]
    firsts = {blocks[0] for blocks in found.problem.units.blocks}
    for names in plan.blocks_by_stage:
        counts.append(counts[-1] + sum(name in firsts for name in names))
    cut = tuple(counts[1:])
    assert room is not None
    assert room.cut_fits(cut)
    best = best_cut(bounds, room)
    assert best is not None
    yield "every cut", bounds.of_every_cut(room, best[1])
    yield "cut", bounds.of_cut(room, cut, best[1])


requests = st.builds(
    PlanRequest,
    global_batch=st.sampled_from([2, 4, 8]),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
    offload=st.sampled_from(["none", "optimizer", "parameters"]),
)


@quick
@given(graphs, clusters, requests, st.sampled_from([0.4, 0.7, 1.0]), st.randoms(use_true_random=False))
def test_no_plan_is_faster_than_a_bound_above_it(
    graph: Graph, cluster: Cluster, request: PlanRequest, share: float, random: Random
) -> None:
    """share: of the memory that the largest of some plans needs."""
    costed = list(some_plans(Problem(graph, cluster, request), random))
    budget = round(share * max((found.needed_bytes for _, found in costed), default=0))
    for asked in (PlanRequest(global_batch=request.global_batch), request):
        problem = Problem(graph, cluster, asked, budget_bytes=budget)
        search = BestFirst(problem, Drafts(problem))
        for plan, found in costed:
            fits = found.needed_bytes <= budget and problem.hosts_hold(found.host_bytes)
            proposed = search.drafts.tables.sharding(point_of(plan).shape) == plan.sharding
            if fits and proposed and plan.offload.what in problem.offloads:
                for name, bound in bounds_above(search, plan):
                    assert bound <= found.step_seconds * (1 + ROUNDING), (name, bound, found.step_seconds, plan)


def some_plans(problem: Problem, random: Random) -> Iterator[tuple[Plan, Estimate]]:
    """Anywhere in the space, with the shardings that the search proposes."""
    every, tables = list(points(problem)), Drafts(problem).tables
    for point in random.sample(every, min(MOST_PLANS, len(every))):
        counts = random.choice(list(stage_counts(problem, point.num_stages)))
        rules = random.choice(recomputes(problem, counts))
        try:
            sharding = tables.sharding(point.shape)
            plan = make_plan(problem, point, counts, sharding or (), rules)
            plan = msgspec.structs.replace(plan, offload=random.choice(offloadings(problem, plan)))
            if sharding is not None and not not_yet(plan):
                yield plan, problem.cost(plan)
        except (PlanError, ScheduleError):
            continue
