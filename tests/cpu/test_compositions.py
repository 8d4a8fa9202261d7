"""Stages multiplied with what divides or changes the work inside them: the same as one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import MODELS, graph_of, source_of
from pool import RankPool, this_rank
from test_compile import needs_compiler
from torch.nn.utils import get_total_norm

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.objective import call, slice_batch
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply, wrap

Pools = Callable[[int], RankPool]
GPT = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=30,tied=true"
SWITCH, DROPLESS = MODELS["switch"], MODELS["dropless"]


@cache
def plan_of(model: str, num_ranks: int, precision: str = "fp64", **asked: Any) -> Plan:
    request = PlanRequest(**{"microbatch": 1, "global_batch": 4, "precision": precision, **asked})
    return try_sharding(plain_plan(request, graph_of(model), num_ranks, "tests"), source_of(model))


def compare_on_rank(model: str, plan: Plan) -> ParityResult:
    source = source_of(model)
    return compare(
        source.small() if model == "mixtral" else source, plan, 2, this_rank()
    )  # its experts one by one, in float64


EXACT = [
    (DROPLESS, 4, {"pp": 2, "ep": 2}),
    (SWITCH, 4, {"pp": 2, "ep": 2}),
    (DROPLESS, 4, {"pp": 2, "ep": 2, "recompute": "full"}),
    ("mixtral", 4, {"pp": 2, "ep": 2}),
    (DROPLESS, 8, {"pp": 2, "ep": 2, "tp": 2}),
    (GPT, 8, {"pp": 2, "zero": 2, "hybrid": 2, "global_batch": 8}),
    (GPT, 8, {"pp": 2, "zero": 3, "hybrid": 2}),
    (GPT, 2, {"pp": 2, "recompute": "selective"}),
    (GPT, 4, {"pp": 2, "tp": 2, "recompute": "selective"}),
    pytest.param(GPT, 2, {"pp": 2, "compile": True}, marks=needs_compiler),
]


@pytest.mark.parametrize(("model", "num_ranks", "asked"), EXACT)
def test_the_same_as_one_process(pool: Pools, model: str, num_ranks: int, asked: dict[str, Any]) -> None:
    for result in pool(num_ranks).run(compare_on_rank, model, plan_of(model, num_ranks, **asked)):
        assert result.first_difference is None


# Half precision


def train(model: str, plan: Plan, max_norm: float | None = None) -> tuple[list[float], float | None]:
    torch.manual_seed(3)
    source = source_of(model)
    program = apply(
        source.build(), plan, optimizer=torch.optim.AdamW, objective=source.objective, max_norm=max_norm,
        device=this_rank().device,
    )  # fmt: skip
    assert source.example is not None
    outputs = [program.step(source.example(plan.global_batch)) for _ in range(3)]
    return [output.loss for output in outputs], outputs[0].gradient_norm


@pytest.mark.parametrize(("precision", "zero"), [("fp16", 0), ("fp16", 1), ("bf16", 0), ("bf16", 1)])
def test_half_precision(pool: Pools, precision: str, zero: int) -> None:
    """Microbatches on stages round as they do in one process, up to the sum over ranks."""
    expected = pool(2).run(train, GPT, plan_of(GPT, 2, precision, zero=zero))[0][0]
    for losses, _ in pool(4).run(train, GPT, plan_of(GPT, 4, precision, pp=2, zero=zero)):
        assert losses == pytest.approx(expected, rel=2e-3)
        assert losses[0] > losses[-1]


# Clipping


@pytest.mark.parametrize(("num_ranks", "zero"), [(4, 0), (8, 1), (8, 3)])
def test_the_norm_is_that_of_one_process(pool: Pools, num_ranks: int, zero: int) -> None:
    torch.manual_seed(3)
    source = source_of(GPT)
    module = source.build().double()
    assert source.example is not None
    batch = source.example(4)
    source.objective.loss(call(module, batch), batch).backward()
    expected = float(get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))
    plan = plan_of(GPT, num_ranks, pp=2, tp=2, zero=zero)
    for _, norm in pool(num_ranks).run(train, GPT, plan, 0.01):
        assert norm == pytest.approx(expected, rel=1e-12)


# What is refused


def refused(plan: Plan, optimizer: Any) -> str:
    try:
        apply(source_of(GPT).build(), plan, optimizer=optimizer, device=this_rank().device)
    except PlanError as error:
        return str(error)
    return ""


def hidden(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, partial(torch.optim.LBFGS, lr=1.0), hidden])
def test_optimizers_that_look_at_whole_tensors(pool: Pools, optimizer: Any) -> None:
    for said in pool(2).run(refused, plan_of(GPT, 2, tp=2), optimizer):
        assert "looks at whole tensors, but with tp=2 a rank holds parts of them" in said


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_compiled_blocks_are_not_divided(pool: Pools, axis: str) -> None:
    for said in pool(2).run(refused, plan_of(GPT, 2, compile=True, **{axis: 2}), torch.optim.AdamW):
        assert said.startswith(
            "this version cannot yet run compile with tp or cp, whose exchanges the compiler cannot follow"
        )


# The user's own loop


def own_loop(model: str, plan: Plan | None) -> list[float]:
    torch.manual_seed(3)
    source = source_of(model)
    module = source.build().double()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    num_ranks, own = 1, 0
    if plan is not None:
        module, optimizer = wrap(module, optimizer, plan, this_rank().device)
        num_ranks, own = plan.mesh.dp, this_rank().number // (plan.mesh.cp * plan.mesh.tp)
    assert source.example is not None
    losses = []
    for step in range(3):
        batch = slice_batch(source.example(12), 4 * step, 4 * step + 4)
        share = slice_batch(batch, own * 4 // num_ranks, (own + 1) * 4 // num_ranks)
        loss = source.objective.loss(call(module, share), share)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (GPT, {"tp": 2}),
        (GPT, {"tp": 2, "zero": 3}),
        (GPT, {"cp": 2}),
        (GPT, {"cp": 2, "zero": 1}),
        (DROPLESS, {"ep": 2}),
    ],
)
def test_wrap(pool: Pools, model: str, asked: dict[str, Any]) -> None:
    expected = own_loop(model, None)
    plan = plan_of(model, 2, microbatch=4 // (2 if "ep" in asked else 1), **asked)
    every = pool(2).run(own_loop, model, plan)
    means = [sum(losses) / 2 for losses in zip(*every, strict=True)]
    assert means == pytest.approx(expected, rel=1e-11)
