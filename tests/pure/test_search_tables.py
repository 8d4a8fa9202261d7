"""What the upper levels of the joint search rest on, on devices that are known by constants: a model that is split further makes no
sample cheaper, and a larger microbatch makes none dearer."""

from __future__ import annotations

from itertools import product

import pytest
from machines import captured_in, machine, measured, named_machine
from transformer import transformer_graph

from meshwright.core.cluster import Cluster, catalogue
from meshwright.core.request import PlanRequest
from meshwright.searching.bounds.step_seconds import SLACK
from meshwright.searching.joint.unit_tables import Tables
from meshwright.searching.problem import Problem
from meshwright.searching.space import Shape, divisors, may_compile, ways

BATCH = 64
CLUSTERS = {"a sheet": named_machine(8), **{name: Cluster.named(name) for name in catalogue()}}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("global_batch", [1, 12, BATCH])
def test_a_further_split_makes_no_sample_cheaper(cluster: Cluster, global_batch: int) -> None:
    graph = captured_in("fp16", transformer_graph(layers=3, hidden=64, heads=8, seq=32))
    problem = Problem(graph, cluster, PlanRequest(global_batch=global_batch))
    tables = Tables(problem)
    assert tables.larger_is_quicker
    alone = tables.least_device_seconds(1, 1)
    for tp, cp in product((1, 2, 4, 8), repeat=2):
        for way in ways(problem, tp, cp):
            found = tables.device_seconds(tp, cp, way)
            assert found >= SLACK * tables.least_device_seconds(tp, 1) >= SLACK**2 * alone


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("hidden", [64, 1024, 8192])
def test_the_larger_a_microbatch_the_cheaper_a_sample(cluster: Cluster, hidden: int) -> None:
    graph = captured_in("fp16", transformer_graph(layers=2, hidden=hidden, heads=8, seq=hidden))
    problem = Problem(graph, cluster, PlanRequest(global_batch=BATCH))
    for compiled in (False, True) if may_compile(problem, 1, 1) else (False,):
        each = [sample_seconds(Tables(problem), size, compiled) for size in divisors(BATCH)]
        assert each == sorted(each, reverse=True)


def sample_seconds(tables: Tables, size: int, compiled: bool) -> float:
    shape = Shape(1, 1, 1, 1, 1, False, size, BATCH // size, compiled)
    found = tables.bounds(shape, sharded=False)
    assert found is not None
    return (found.forward_seconds + found.backward_seconds) / size


def test_of_a_measured_device_every_microbatch_is_looked_at() -> None:
    """Sixteen at a time run twice as well as any other number."""
    graph = captured_in("fp16", transformer_graph(layers=2, hidden=64, heads=8, seq=32))
    tables = Tables(
        Problem(graph, measured(machine(1), {1.0: 1.0, 1e7: 2.0, 1e8: 1.0}), PlanRequest(global_batch=BATCH))
    )
    assert not tables.larger_is_quicker
    least = min(sample_seconds(tables, size, False) for size in divisors(BATCH))
    assert least < sample_seconds(tables, BATCH, False)
    assert tables.least_device_seconds(1, 1) <= BATCH * least


def test_degrees_that_do_not_divide_the_model_are_left_out_with_all_below_them() -> None:
    graph = captured_in("fp16", transformer_graph(layers=2, hidden=64, heads=8, seq=32))
    tables = Tables(Problem(graph, machine(16), PlanRequest(global_batch=4)))
    assert tables.least_device_seconds(16, 1) == float("inf")
    assert tables.refusals
