"""Layers that a forward leaves out at random: dp ranks draw otherwise, and ZeRO gathers what any of them calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ASSETS, graph_of, source_of
from pool import RankError, RankPool, this_rank

from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.models.objective import slice_batch
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.gather import whole

Pools = Callable[[int], RankPool]
STEPS = 6
MODELS = {name: f"{ASSETS}/drawn_layers.py:{name}" for name in ("by_python", "by_torch", "after_frozen")}
MODELS["bart"] = f"hf:{ASSETS}/bart-layerdrop.json"


def plan_of(model: str, **asked: Any) -> Plan:
    request = PlanRequest(**{"precision": "fp64", "global_batch": 8, "microbatch": 2, "dp": 2, **asked})
    num_ranks = request.dp * (request.tp or 1)  # type: ignore[operator]
    return plain_plan(request, graph_of(MODELS[model]), num_ranks, "tests")


def trained(model: str, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the parameters after them; each replica draws for itself."""
    source, rank = source_of(MODELS[model]), this_rank()
    assert source.example is not None
    torch.manual_seed(3)
    module = source.build().double().train()
    program = apply(module, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device=rank.device)
    replica = program.mesh.get_local_rank("dp")
    torch.manual_seed(replica)
    random.seed(replica)
    batches = source.example(STEPS * 8)
    losses = [program.step(slice_batch(batches, step * 8, step * 8 + 8)).loss for step in range(STEPS)]
    if plan.mesh.tp > 1:
        return losses, {}
    return losses, {name: whole(parameter).detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("model", ["by_python", "by_torch", "bart"])
def test_zero_gives_what_replicas_give(pool: Pools, model: str) -> None:
    expected = pool(2).run(trained, model, plan_of(model, zero=0))[0]
    for asked in ({"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "recompute": "full"}):
        losses, parameters = pool(2).run(trained, model, plan_of(model, **asked))[0]
        torch.testing.assert_close(losses, expected[0], rtol=1e-10, atol=0)
        for name, parameter in expected[1].items():
            torch.testing.assert_close(parameters[name], parameter, rtol=1e-9, atol=1e-12, msg=f"{asked}: {name}")


def test_with_tensor_parallel_ranks(pool: Pools) -> None:
    expected = pool(2).run(trained, "by_torch", plan_of("by_torch", zero=0))[0]
    losses, _ = pool(4).run(trained, "by_torch", plan_of("by_torch", zero=3, tp=2))[0]
    torch.testing.assert_close(losses, expected[0], rtol=1e-10, atol=0)


def test_refused_where_backward_does_not_come_to_them(pool: Pools) -> None:
    with pytest.raises(RankError, match=r"ModelError: block 'blocks\.\d' .* all before it is frozen"):
        pool(2).run(trained, "after_frozen", plan_of("after_frozen", zero=3))


@pytest.mark.parametrize("model", ["by_python", "by_torch"])
def test_capture_takes_every_block(model: str) -> None:
    graph = graph_of(MODELS[model])
    assert not graph.guesses
    assert [block.name for block in graph.blocks if block.name.startswith("blocks.")] == [
        f"blocks.{n}" for n in range(5)
    ]
