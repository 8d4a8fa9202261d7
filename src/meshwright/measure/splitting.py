"""What an op costs in Python beyond its launch: where tensors lie split over tp or cp, and where a backward runs in halves.

A model too small to compute anything runs forward as one of two tp ranks that are pretended, so that nothing is communicated:

    split launch  = seconds of the forward / its ops as captured                                  -> measure_split_launch

and forward and backward with the gradients of weights put off, against plain. All that is more is counted with forward's ops,
each of which passes the mode that finds the weights:

    halves launch = launch + (seconds in halves - seconds plain) / ops of forward                 -> measure_halves_launch
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from meshwright.core.request import PlanRequest
from meshwright.measure.kernels import TINY_MODEL, count_ops, tiny_graph
from meshwright.measure.stopwatch import typical_seconds
from meshwright.models.objective import call, map_batch
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.pipeline.weights import WeightsLater
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import lay
from meshwright.runtime.split.splitter import Splitter
from meshwright.runtime.split.weights import cut_weights, layouts_of_parameters

PRETENDED_RANKS = 2


def measure_split_launch(device: torch.device) -> float:
    """Least seconds one op of a split model costs in forward."""
    source = resolve(TINY_MODEL)
    graph = tiny_graph()
    module = source.build().to(device)
    plan = plain_plan(PlanRequest(tp=PRETENDED_RANKS, global_batch=2), graph, PRETENDED_RANKS, "")
    ranks = Ranks("tp", PRETENDED_RANKS)
    cut_weights(module, plan, ranks)
    parameters = dict(module.named_parameters())
    for name, layout in layouts_of_parameters(module).items():
        lay(parameters[name], layout)
    assert source.example is not None
    batch = map_batch(lambda tensor: tensor.to(device), source.example(2))
    splitter = Splitter([ranks])

    def forward() -> Tensor:
        splitter.read(batch)
        with splitter:
            return source.objective.loss(call(module, batch), batch)

    return typical_seconds(forward, device) / count_ops(graph, "forward")


def measure_halves_launch(device: torch.device, launch_seconds: float) -> float:
    """Seconds one op of forward costs where its backward runs in halves; no less than the plain launch."""
    source = resolve(TINY_MODEL)
    module = source.build().to(device)
    assert source.example is not None
    batch = map_batch(lambda tensor: tensor.to(device), source.example(2))

    def step(later: WeightsLater | None) -> None:
        with later or nullcontext():
            loss = source.objective.loss(call(module, batch), batch)
        if later is not None:
            later.owner = module
        loss.backward()
        if later is not None:
            later.run(module)
        module.zero_grad()

    plain = typical_seconds(lambda: step(None), device)
    halves = typical_seconds(lambda: step(WeightsLater()), device)
    return launch_seconds + max(0.0, halves - plain) / count_ops(tiny_graph(), "forward")
