"""Parameters, gradients and optimizer state that each rank really holds, against cost's formulas, by dtype and on odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import ZERO_STAGES, Case, graph_of, plan_of, source_of
from pool import RankPool, this_rank
from torch import Tensor

from meshwright.core.graph import Precision
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.memory.local_parameters import held_elements, items_of, local_parameters
from meshwright.runtime.apply import apply
from meshwright.runtime.clip import local
from meshwright.runtime.optimizer import state_tensors

Pools = Callable[[int], RankPool]
Held = dict[str, int]


def held_on_rank(case: Case) -> Held:
    """Bytes by kind when the gradients are ready, and the state after the update."""
    source, plan = source_of(case.model), plan_of(case)
    program = apply(
        source.build(), plan, optimizer=torch.optim.AdamW, objective=source.objective, device=this_rank().device
    )
    held: Held = {}

    def measure(*_: object) -> None:
        parameters = list(program.module.parameters())
        held["parameters"] = elements_bytes(parameters)
        held["gradients"] = elements_bytes([p.grad for p in parameters if p.grad is not None])

    program.optimizer.register_step_pre_hook(measure)
    assert source.example is not None
    program.step(source.example(plan.global_batch))
    held["optimizer_state"] = elements_bytes(state_tensors(program.optimizer))
    return held


def elements_bytes(tensors: object) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))  # type: ignore[attr-defined]


def formulas(plan: Plan, case: Case) -> Held:
    items, parameters = items_of(plan, Recipe()), local_parameters(graph_of(case.model), plan, 0)
    trained = held_elements(parameters, plan, trainable_only=True)
    num_trained = sum(parameter.trainable for parameter in parameters)
    return {
        "parameters": held_elements(parameters, plan) * items.parameter,
        "gradients": trained * items.gradient,
        "optimizer_state": trained * items.state + num_trained * Recipe().optimizer_scalar_bytes,
    }


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_state_of_two_ranks(pool: Pools, zero: int, precision: Precision) -> None:
    check_state(pool(2), Case("odd", zero, "none", 1, precision))


@pytest.mark.parametrize(
    "case", [Case("odd", 3, "none", 1, "bf16"), Case("frozen", 2, "none", 1, "fp32", hybrid=2)], ids=str
)
def test_state_of_four_ranks(pool: Pools, case: Case) -> None:
    check_state(pool(4), case)


def check_state(ranks: RankPool, case: Case) -> None:
    """The first rank holds the largest shard; the others' are padded to it where they are exchanged, and all make up the whole."""
    first, *others = every = ranks.run(held_on_rank, case)
    plan = plan_of(case, ranks.num_ranks)
    assert first == formulas(plan, case)
    for kind, size in first.items():
        assert all(other[kind] <= size for other in others)
    whole = formulas(plan_of(Case(case.model, precision=case.precision), 1), case)
    for kind in ("parameters", "gradients"):
        copies = plan.mesh.dp // plan.shard_degree
        assert sum(one[kind] for one in every) == copies * whole[kind]
