"""Of the parity table (table.py), a subset: pairs of axes, each with some of the models.

`make parity` fills all of it. Planted errors: a table that cannot fail proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool, this_rank
from table import BESIDES, MODELS, PAIRS, ROWS, TRIPLES, Row, fill, graph_of, row, source_of

from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.models.objective import call
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]
FEW_STEPS = 2

CELLS = [
    ("vit", row(4, tp=2, zero=3)),
    ("vit", row(4, cp=2, zero=2)),
    ("ViT", row(4, tp=2, cp=2)),
    ("Llama", row(4, tp=2, sequence_parallel=True, zero=2)),
    ("GPT-2", row(4, cp=2, zero=3)),
    ("Mixtral", row(4, ep=2, zero=3)),
    ("T5", row(4, pp=2, zero=1)),
    ("BERT", row(4, tp=2, cp=2)),
    ("Llama", row(4, tp=2, cp=2)),
    ("gpt", row(4, tp=2, sequence_parallel=True, cp=2)),
    ("Mixtral", row(4, tp=2, ep=2)),
    ("ViT", row(4, tp=2, pp=2)),
    ("Llama", row(4, cp=2, pp=2)),
    ("GPT-2", row(4, tp=2, sequence_parallel=True, pp=2, schedule="zb")),
    ("Mixtral", row(4, cp=2, ep=2)),
    ("resnet", row(2, pp=2, recompute="full")),
    ("gpt", row(2, tp=2, recompute="full")),
    ("gpt", row(2, tp=2, sequence_parallel=True, recompute="selective")),
    ("Llama", row(2, cp=2, recompute="selective")),
    ("moe", row(2, ep=2, recompute="full")),
    ("gpt", row(2, pp=2, schedule="zbv")),
    ("moe", row(4, ep=2, pp=2)),
    ("gpt", row(8, pp=2, zero=1, hybrid=2)),
    ("resnet", row(4, tp=2, sync_batch_norm=True)),
]
"""Every pair of axes is in some row."""
BESIDE_CELLS = [
    ("moe in balance", row(4, tp=2, sequence_parallel=True, cp=2)),
    ("moe that drops", row(4, tp=2, sequence_parallel=True, cp=2)),
    ("moe that drops", row(2, cp=2)),
    ("moe in balance", row(2, cp=2, recompute="full")),
    ("moe that drops", row(2, tp=2, sequence_parallel=True)),
    ("moe in balance", row(2, tp=2, sequence_parallel=True, recompute="full")),
    ("gpt by single ops", row(2, cp=2, context="ring", recompute="selective")),
    ("DeiT", row(2, cp=2, recompute="full")),
    ("DeiT", row(4, tp=2, cp=2)),
    ("I-JEPA", row(4, cp=2, pp=2)),
    ("I-JEPA", row(2, cp=2, context="ring")),
    ("DiT", row(4, cp=2, zero=3)),
    ("DINOv2", row(2, cp=2, recompute="selective")),
    ("BEiT", row(2, cp=2)),
    ("wav2vec2", row(2, cp=2)),
    ("gpt of odd length", row(4, tp=2, cp=2)),
    ("gpt of odd length", row(4, cp=4, recompute="full")),
    ("BERT of odd length", row(4, cp=2, pp=2)),
    ("moe of odd length", row(2, cp=2)),
]
"""What a router counts over tokens that lie over ranks; keys that are gathered inside an attention core that is made again; tokens
that blocks cut, since the model looks up none; and numbers of tokens that do not divide."""
AXES = ("tp", "sequence_parallel", "cp", "ep", "pp", "zero", "recompute")
APART = {frozenset({"recompute", "zero"}), frozenset({"sequence_parallel", "ep"})}
"""Pairs that other files run: test_parity.py, test_expert_parallel.py; or that only the whole table has."""


@pytest.mark.parametrize(("model", "plan"), [*CELLS, *BESIDE_CELLS], ids=str)
def test_agrees_with_one_process(pool: Pools, model: str, plan: Row) -> None:
    cell = fill(pool(plan.num_ranks), model, plan, FEW_STEPS)
    assert not cell.refused
    assert cell.ok, cell.wrong
    assert cell.result is not None
    assert cell.result.max_loss_difference <= 1e-14
    assert cell.result.num_tensors > 0


def axes_of(plan: Row) -> set[str]:
    return {axis for axis in AXES if getattr(plan.request, axis)}


def test_every_pair_of_axes_is_in_some_cell() -> None:
    for pair in map(set, combinations(AXES, 2)):
        assert any(pair <= axes_of(plan) for plan in (*PAIRS, *TRIPLES)), pair
        assert pair in APART or any(pair <= axes_of(plan) for _, plan in CELLS), pair
    assert {model for model, _ in CELLS} == set(MODELS)
    assert {model for model, _ in BESIDE_CELLS} == set(BESIDES)
    assert len({str(plan) for plan in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        ("gpt", row(2, ep=2), "ep=2, but the model has no experts in stacked parameters"),
        ("Llama", row(2, pp=2, schedule="zbv"), "has 2 repeated blocks"),
    ],
)
def test_what_cannot_run_is_refused(pool: Pools, model: str, plan: Row, said: str) -> None:
    assert said in fill(pool(plan.num_ranks), model, plan, 1).refused


# Planted errors


def scale_one_gradient(program: Program) -> None:
    """One gradient is averaged over the dp ranks once too often."""
    parameter = list(program.module.parameters())[-1]

    def spoil(*_: Any) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(program.plan.mesh.dp)

    program.optimizer.register_step_pre_hook(spoil)


@pytest.mark.parametrize("plan", [row(2), row(4, tp=2, zero=2)], ids=str)
def test_a_gradient_off_by_the_degree_of_dp_fails_the_table(pool: Pools, plan: Row) -> None:
    cell = fill(pool(plan.num_ranks), "gpt", plan, 1, scale_one_gradient)
    assert not cell.ok
    assert cell.wrong.startswith("step 0: gradient of head.weight differs by 0.5 ")


# bf16 against fp32

LOSS_BOUND = 2e-2
"""Relative: 8 bits of mantissa are 4e-3 an operation."""
DIRECTION_BOUND = 0.99
"""Least cosine between the gradients of all parameters, taken as one vector, and those of one process in fp32."""


def compare_in_bf16(model: str, plan: Plan) -> tuple[float, float]:
    """Relative difference of the loss, and the cosine between gradients, after one step."""
    source, rank = source_of(model, "fp32"), this_rank()
    assert source.example is not None
    batch = source.example(plan.global_batch)
    torch.manual_seed(1)
    alone = source.build()
    expected = source.objective.loss(call(alone, batch), batch)
    expected.backward()
    torch.manual_seed(1)
    program = apply(source.build(), plan, optimizer=torch.optim.SGD, objective=source.objective, device=rank.device)
    found: dict[str, torch.Tensor] = {}

    def note(*_: Any) -> None:
        from meshwright.measure.parity import _gradients

        found.update(_gradients(program.module, program.mesh))

    program.optimizer.register_step_pre_hook(note)
    loss = program.step(batch).loss
    exact = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
    rough = torch.cat([found[name].flatten().float() for name, p in alone.named_parameters() if p.grad is not None])
    return abs(loss - expected.item()) / abs(expected.item()), float(F.cosine_similarity(exact, rough, dim=0))


@pytest.mark.parametrize("plan", [row(2, zero=2), row(2, tp=2)], ids=str)
def test_bf16_stays_near_fp32(pool: Pools, plan: Row) -> None:
    """Sixteen bits round: the loss within two in a hundred, the gradient in the same direction."""
    from meshwright.measure.checking.small_plan import try_sharding

    wish = PlanRequest(precision="bf16", microbatch=2, global_batch=4 * plan.dp)
    made = plain_plan(plan.request.updated(wish), graph_of("gpt", "fp32"), plan.num_ranks, "table")
    for difference, cosine in pool(plan.num_ranks).run(
        compare_in_bf16, "gpt", try_sharding(made, source_of("gpt", "fp32"))
    ):
        assert 0 < difference <= LOSS_BOUND
        assert DIRECTION_BOUND <= cosine < 1
