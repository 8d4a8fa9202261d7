"""What an op costs in Python where tensors lie split over tp or cp: every function follows a rule of the Splitter.

A model too small to compute anything runs forward as one of two tp ranks that are pretended, so that nothing is communicated:

    split launch = seconds of the forward / its ops as captured
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.capture.capture import capture_source
from meshwright.core.request import PlanRequest, plain_plan
from meshwright.measure.kernels import TINY_MODEL, count_ops
from meshwright.measure.stopwatch import typical_seconds
from meshwright.models.objective import call, map_batch
from meshwright.models.source import resolve
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import lay
from meshwright.runtime.split.splitter import Splitter
from meshwright.runtime.split.weights import cut_weights, layouts_of_parameters

PRETENDED_RANKS = 2


def measure_split_launch(device: torch.device) -> float:
    """Least seconds one op of a split model costs in forward."""
    source = resolve(TINY_MODEL)
    graph = capture_source(source)
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
