"""Whether all samples go through the blocks in one order, as sharded state needs.

ZeRO 1, 2 and 3 gather each block by itself when it is called. Where a forward calls a block for some samples only (an expert that
nobody chose, an early exit), the other ranks gather it at its place in the order (runtime/passed_over.py). A forward that calls
blocks in another order for other samples, or some of them several times, has no such place: one rank would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import nn

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.measure.mean_loss import loss_in_one_process
from meshwright.models.objective import Batch, Objective, num_samples, slice_batch


def check_called(build: Callable[[], nn.Module], batch: Batch, objective: Objective, plan: Plan) -> None:
    """build: gives the same small module at every call. batch: of some steps; each microbatch of it is tried."""
    if not plan.zero or plan.mesh.dp == 1:
        return
    first: list[str] | None = None
    for start in range(0, num_samples(batch), plan.microbatch):
        called = _called(build(), slice_batch(batch, start, start + plan.microbatch), objective, plan)
        first = called if first is None else first
        if called != first and not (_in_order(called, plan) and _in_order(first, plan)):
            raise _refusal(sorted(set(called) ^ set(first)) or called, plan)


def _in_order(called: list[str], plan: Plan) -> bool:
    """Whether blocks are called in the plan's order, each once or never."""
    numbers = [plan.blocks.index(name) for name in called]
    return all(number < after for number, after in pairwise(numbers))


def _called(module: nn.Module, batch: Batch, objective: Objective, plan: Plan) -> list[str]:
    found: list[str] = []
    for name in plan.blocks:
        module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: found.append(name))
    loss_in_one_process(module, batch, objective)
    return found


def _refusal(names: list[str], plan: Plan) -> PlanError:
    return PlanError(
        f"block '{names[0]}' is called for some batches and not for others, and blocks are called several times or in another "
        f"order than {list(plan.blocks[:3])} …: ZeRO {plan.zero} gathers each block when it is called, and a rank that calls it "
        "would wait for those that do not; use zero 0, or put the choice into a block that every sample goes through"
    )
