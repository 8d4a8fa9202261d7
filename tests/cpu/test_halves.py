"""What cost says a schedule may put off is what the runtime puts off: products with whole parameters, not with experts'."""

from __future__ import annotations

import msgspec
import torch

from meshwright.capturing.capture import capture_source
from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import Estimator
from meshwright.measure.splitting import measure_halves_launch, measure_split_launch
from meshwright.models.objective import call
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.pipeline.weights import WeightsLater

MODEL = "moe:layers=2,hidden=16,heads=2,seq=8,vocab=32,experts=4,top=1"


def weights_seconds(graph: Graph) -> float:
    plan = plain_plan(PlanRequest(pp=2, schedule="zb", global_batch=2), graph, 2, "")
    cluster = Cluster.named("a100-80g-selene")
    return sum(stage.weights for stage in Estimator(graph, plan, cluster, Recipe()).stages)


def test_gradients_of_experts_are_not_put_off() -> None:
    source = resolve(MODEL)
    graph = capture_source(source)
    everywhere = msgspec.structs.replace(
        graph,
        kinds=tuple(
            msgspec.structs.replace(kind, ops=tuple(msgspec.structs.replace(op, region="") for op in kind.ops))
            for kind in graph.kinds
        ),
    )
    assert 0 < weights_seconds(graph) < weights_seconds(everywhere)

    later, module = WeightsLater(), source.build()
    assert source.example is not None
    batch = source.example(2)
    with later:
        loss = source.objective.loss(call(module, batch), batch)
    later.owner = module
    loss.backward()
    waiting = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert waiting
    assert not any("experts" in name for name in waiting)
    later.run(module)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_what_python_adds_to_an_op_is_measured() -> None:
    """No more than that it runs and gives seconds: how many depends on the machine."""
    device = torch.device("cpu")
    assert measure_split_launch(device) > 0
    assert measure_halves_launch(device, 1e-5) >= 1e-5
