"""Optimizer state on the host: the same result as on the device, whatever leaves, arrives late or is shared.

Device and host are both the CPU here, with a link between them that is as slow as a test wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from cases import Case, plan_of, source_of
from pool import RankPool
from torch import Tensor, nn

from meshwright.core.plan import Offload, Plan
from meshwright.runtime.apply import apply
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]

SLOW_LINK = 4e6
"""Bytes a second: a microbatch's gradients take longer than its backward."""
NUM_STEPS = 4


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    module = source_of(case.model).build()
    return module.double() if case.precision == "fp64" else module


def batches(case: Case, num_ranks: int, num_steps: int = NUM_STEPS) -> list[Any]:
    make = source_of(case.model).example
    assert make is not None
    torch.manual_seed(11)
    return [make(case.samples * num_ranks) for _ in range(num_steps)]


def plan_with(case: Case, **offload: Any) -> Plan:
    return msgspec.structs.replace(plan_of(case), offload=Offload(**{"what": "optimizer", **offload}))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def trained(
    case: Case, plan: Plan, optimizer: Any, max_norm: float | None, **options: Any
) -> tuple[list[float], Program]:
    program = apply(
        build(case), plan, optimizer=optimizer, objective=source_of(case.model).objective, max_norm=max_norm, **options
    )
    losses = [program.step(batch).loss for batch in batches(case, plan.mesh.dp)]
    if program.host is not None:
        program.host.settle()
    return losses, program


def tensors_of(program: Program) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    named = program.module.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}


def differences_on_rank(
    case: Case,
    offload: dict[str, Any],
    optimizer: Any = adamw,
    max_norm: float | None = None,
    link: float | None = None,
) -> tuple[float, float]:
    """Largest difference of losses, and of parameters after the last step, between offloaded and in memory."""
    losses, program = trained(case, plan_with(case, **offload), optimizer, max_norm, host_link=link)
    found = tensors_of(program)
    assert program.host is not None
    program.host.close()
    expected_losses, plain = trained(case, plan_of(case), optimizer, max_norm)
    expected = tensors_of(plain)
    assert found.keys() == expected.keys()
    largest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    return max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)), largest


EXACT = [
    (Case("gpt", precision="fp32"), {}, adamw, None),
    (Case("gpt", precision="fp64"), {}, adamw, None),
    (Case("tied", precision="fp32"), {}, adamw, None),
    (Case("tied", precision="fp32", recompute="full"), {"share": 0.4}, adamw, None),
    (Case("gpt", precision="fp32", num_microbatches=2), {}, adamw, None),
    (Case("gpt", precision="fp32", num_microbatches=4), {"share": 0.6}, adamw, None),
    (Case("gpt", precision="fp64"), {"share": 0.3}, sgd, None),
    (Case("gpt", precision="fp64"), {}, adafactor, None),
    (Case("frozen", precision="fp32"), {}, adamw, None),
    (Case("unused", precision="fp64"), {}, adamw, None),
    (Case("resnet", precision="fp64"), {"share": 0.5}, sgd, None),
    (Case("llama", precision="fp32"), {}, adamw, None),
]


@pytest.mark.parametrize(("case", "offload", "optimizer", "max_norm"), EXACT, ids=lambda value: str(value))
def test_one_rank_to_the_last_bit(
    pool: Pools, case: Case, offload: dict[str, Any], optimizer: Any, max_norm: float | None
) -> None:
    """Same operations in the same order: nothing differs, though copies overlap and arrive late."""
    loss, parameter = pool(1).run(differences_on_rank, case, offload, optimizer, max_norm, SLOW_LINK)[0]
    assert loss == 0
    assert parameter <= (
        1e-7 if case.precision == "fp32" else 0
    )  # entries beyond the last full vector may round otherwise


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("max_norm", [1e-2, 1e6])
def test_clipping(pool: Pools, num_microbatches: int, share: float, max_norm: float) -> None:
    case = Case("gpt", precision="fp64", num_microbatches=num_microbatches)
    loss, parameter = pool(1).run(differences_on_rank, case, {"share": share}, adamw, max_norm)[0]
    assert loss < 1e-12
    assert parameter < 1e-12


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", precision="fp64"),
        Case("gpt", 1, "full", 2),
        Case("odd", 2),
        Case("tied", 3, "none", 2),
        Case("gpt", 3, hybrid=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("offload", [{}, {"share": 0.5}], ids=str)
def test_two_ranks(pool: Pools, case: Case, offload: dict[str, Any]) -> None:
    """Each rank updates what it holds: its shards under ZeRO."""
    for loss, parameter in pool(2).run(differences_on_rank, case, offload, adamw, 0.1):
        assert loss < 1e-12
        assert parameter < 1e-11
