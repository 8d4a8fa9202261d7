"""What the upper levels of the joint search rest on: a model that is split further makes no sample cheaper."""

from __future__ import annotations

from itertools import product

import pytest
from machines import captured_in, machine, named_machine
from transformer import transformer_graph

from meshwright.core.cluster import Cluster
from meshwright.core.request import PlanRequest
from meshwright.search.best_first import EVEN_SLACK
from meshwright.search.problem import Problem
from meshwright.search.space import ways
from meshwright.search.tables import Tables

CLUSTERS = {
    "kernels": machine(8),
    "a slow start": machine(8, launch_seconds=1e-3),
    "a processor": machine(8, kind="cpu"),
    "a sheet": named_machine(8),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("global_batch", [1, 12, 64])
def test_a_further_split_makes_no_sample_cheaper(cluster: Cluster, global_batch: int) -> None:
    graph = captured_in("fp16", transformer_graph(layers=3, hidden=64, heads=8, seq=32))
    problem = Problem(graph, cluster, PlanRequest(global_batch=global_batch))
    tables = Tables(problem)
    alone = tables.least_device_seconds(1, 1)
    for tp, cp in product((1, 2, 4, 8), repeat=2):
        for way in ways(problem, tp, cp):
            found = tables.device_seconds(tp, cp, way)
            assert found >= EVEN_SLACK * tables.least_device_seconds(tp, 1) >= EVEN_SLACK**2 * alone


def test_degrees_that_do_not_divide_the_model_are_left_out_with_all_below_them() -> None:
    graph = captured_in("fp16", transformer_graph(layers=2, hidden=64, heads=8, seq=32))
    tables = Tables(Problem(graph, machine(16), PlanRequest(global_batch=4)))
    assert tables.least_device_seconds(16, 1) == float("inf")
    assert tables.refusals
