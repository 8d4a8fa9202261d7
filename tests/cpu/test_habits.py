"""People's habits: optimizers, parameter groups, frozen parts, adapters, packed rows, branches. Each gives what one process gives.

A row is a way to spread (`SPREADS`) times a habit; a new axis is a new row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ASSETS, ZERO_STAGES, Case, plan_of, source_of
from pool import RankError, RankPool, this_rank
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.core.errors import MeshwrightError
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.objective import call, default_loss, slice_batch
from meshwright.runtime.apply import apply, wrap
from meshwright.runtime.gather import whole
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]
Spread = dict[str, Any]

SPREADS: list[Spread] = [{"zero": zero} for zero in ZERO_STAGES]
STEPS = 4
BOUND = 1e-10


class SignDescent(Optimizer):
    """An optimizer of the user's own, in the manner of Lion: the sign of a running mean, and decay."""

    def __init__(self, parameters: Any, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(mean.sign(), alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "the user's own": lambda p: SignDescent(p, lr=1e-3, weight_decay=0.1),
}


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Vectors do not decay and learn faster."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    vectors, others = ([p for p in trained if (p.dim() < 2) is flat] for flat in (True, False))
    return [{"params": others}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]


def build(model: str) -> nn.Module:
    torch.manual_seed(7)
    return source_of(model).build().double()


def doubled(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def batches_of(model: str, size: int) -> list[Any]:
    make = source_of(model).example
    assert make is not None
    everything = doubled(make(STEPS * size))
    return [slice_batch(everything, step * size, (step + 1) * size) for step in range(STEPS)]


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p).clone() for name, p in module.named_parameters()}


def difference(found: nn.Module, expected: nn.Module) -> float:
    one, other = parameters_of(found), parameters_of(expected)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def train_alone(module: nn.Module, optimizer: Optimizer, batches: list[Any]) -> nn.Module:
    for batch in batches:
        default_loss(call(module, batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def trained_on_rank(model: str, spread: Spread, kind: str, grouped: bool) -> float:
    """How far the parameters of a program lie from those of one process, under an optimizer."""
    plan = plan_of(Case(model, num_microbatches=2, **spread))
    batches = batches_of(model, plan.global_batch)
    alone, module = build(model), build(model)
    make = OPTIMIZERS[kind]
    optimizer = make(groups_of(alone) if grouped else [p for p in alone.parameters() if p.requires_grad])
    given: Any = make(groups_of(module)) if grouped else make
    program = apply(module, plan, optimizer=given, device=this_rank().device)
    for batch in batches:
        program.step(batch)
    return difference(program.module, train_alone(alone, optimizer, batches))


@pytest.mark.parametrize("spread", SPREADS, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer(pool: Pools, spread: Spread, kind: str) -> None:
    assert max(pool(2).run(_trained_in_both_ways, spread, kind)) < BOUND


def _trained_in_both_ways(spread: Spread, kind: str) -> float:
    """With groups on a model with frozen parts, and without on one that is trained whole."""
    return max(trained_on_rank("frozen", spread, kind, True), trained_on_rank("odd", spread, kind, False))


def adafactor(parameters: Any) -> Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def adafactor_on_rank(zero: int) -> float | str:
    plan = plan_of(Case("odd", zero))
    batches = batches_of("odd", plan.global_batch)
    alone = build("odd")
    program = apply(build("odd"), plan, optimizer=adafactor, device=this_rank().device)
    try:
        for batch in batches:
            program.step(batch)
    except (RuntimeError, MeshwrightError) as error:
        return str(error)
    return difference(program.module, train_alone(alone, adafactor(alone.parameters()), batches))


def test_adafactor_under_replicas(pool: Pools) -> None:
    """It reads rows and columns of whole tensors."""
    for found in pool(2).run(adafactor_on_rank, 0):
        assert isinstance(found, float)
        assert found < BOUND


# What is trained, and what goes in.


def compare_on_rank(model: str, spread: Spread, num_microbatches: int) -> ParityResult:
    name = f"{ASSETS}/models.py:{model}"
    plan = plan_of(Case(name, num_microbatches=num_microbatches, **spread))
    return compare(source_of(name).small(), plan, 3, this_rank())


@pytest.mark.parametrize("spread", SPREADS, ids=str)
@pytest.mark.parametrize("model", ["adapted", "packed"])
def test_adapters_and_packed_rows(pool: Pools, spread: Spread, model: str) -> None:
    for result in pool(2).run(compare_on_rank, model, spread, 2):
        assert result.ok, result.first_difference


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_branch_that_one_rank_does_not_take(pool: Pools, num_microbatches: int) -> None:
    """Rank 0 has samples for it, rank 1 has none: its gradient there counts as zeros."""
    for result in pool(2).run(compare_on_rank, "sometimes", {"zero": 0}, num_microbatches):
        assert result.ok, result.first_difference


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed: pip install peft")
@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_adapters_of_peft(pool: Pools, spread: Spread) -> None:
    for found, frozen in pool(2).run(peft_on_rank, spread):
        assert found < BOUND
        assert frozen == 0.0, "a frozen parameter moved"


def peft_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        build("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    ).double()


def peft_on_rank(spread: Spread) -> tuple[float, float]:
    """Difference from one process, and how far frozen parameters have moved."""
    from meshwright.capturing.capture import capture
    from meshwright.core.request import PlanRequest
    from meshwright.rules.plain_plan import plain_plan

    alone, module = peft_model(), peft_model()
    start = parameters_of(module)
    batches = batches_of("llama", 8)
    plan = plain_plan(
        PlanRequest(global_batch=8, precision="fp64", **spread), capture(peft_model(), batches[0]), 2, "tests"
    )
    make = OPTIMIZERS["AdamW fused"]
    program = apply(module, plan, optimizer=make, device=this_rank().device)
    for batch in batches:
        program.step(batch)
    train_alone(alone, make([p for p in alone.parameters() if p.requires_grad]), batches)
    now = parameters_of(program.module)
    fixed = [name for name, p in alone.named_parameters() if not p.requires_grad]
    return difference(program.module, alone), max(float((now[name] - start[name]).abs().max()) for name in fixed)


# Own loops.


def own_loop_on_rank(model: str, spread: Spread) -> float:
    """Accumulation, clipping by torch's own function and a scheduler of learning rates, all in the user's hands."""
    rank = this_rank().number
    plan = plan_of(Case(model, num_microbatches=2, **spread))
    batches = batches_of(model, plan.global_batch)
    alone, module = build(model), build(model)
    optimizers = [torch.optim.AdamW(groups_of(one), lr=1e-2) for one in (alone, module)]
    spread_module, optimizers[1] = wrap(module, optimizers[1], plan, this_rank().device)
    rates = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) for optimizer in optimizers]
    share = plan.microbatch * plan.num_microbatches
    for batch in batches:
        for index in range(plan.num_microbatches):
            start = rank * share + index * plan.microbatch
            part = slice_batch(batch, start, start + plan.microbatch)
            (default_loss(call(spread_module, part), part) / plan.num_microbatches).backward()
        default_loss(call(alone, batch), batch).backward()
        for one, optimizer, rate in zip((alone, spread_module), optimizers, rates, strict=True):
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
    return difference(spread_module, alone)


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_an_own_loop_with_everything(pool: Pools, spread: Spread) -> None:
    assert max(pool(2).run(own_loop_on_rank, "frozen", spread)) < BOUND


def test_an_own_loop_with_a_branch_that_one_rank_does_not_take(pool: Pools) -> None:
    assert max(pool(2).run(own_loop_on_rank, f"{ASSETS}/models.py:sometimes", {"zero": 0})) < BOUND


# Values that are not finite, in a program of the user's own.


def broken_on_rank(spread: Spread) -> None:
    name = f"{ASSETS}/models.py:broken"
    plan = plan_of(Case(name, **spread))
    program: Program = apply(build(name), plan, optimizer=OPTIMIZERS["Adam"], device=this_rank().device, find_nan=True)
    for batch in batches_of(name, plan.global_batch):
        program.step(batch)


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_the_block_that_made_a_nan(pool: Pools, spread: Spread) -> None:
    with pytest.raises(RankError) as caught:
        pool(2).run(broken_on_rank, spread)
    said = (
        "RunError: the loss is nan at step 1: first in forward of block 'layers.1.down.0' (Breaks), at step 1 on rank 1"
    )
    assert caught.value.errors == dict.fromkeys(range(2), said)
