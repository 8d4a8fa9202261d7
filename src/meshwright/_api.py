"""The functions of `import meshwright as mw` that wire rooms together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.capturing.capture import capture as capture_module
from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph, Precision
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.measure.checking.first_batch import FirstBatch
from meshwright.measure.record import StepRecorder
from meshwright.models.objective import Batch, objective_of
from meshwright.planner.flags import request_of
from meshwright.planner.plan import plan as search_plan
from meshwright.planner.shardings import remember, settled
from meshwright.rules.plain_plan import plain_plan as plan_plainly
from meshwright.runtime.apply import apply as apply_plan
from meshwright.runtime.apply import wrap as wrap_plan
from meshwright.runtime.optimizer import OptimizerFactory
from meshwright.runtime.program import Program

Loss = Callable[[Any, Batch], Tensor]
Count = Callable[[Batch], int]


def capture(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    count: Count | None = None,
    precision: Precision = "fp32",
) -> Graph:
    """Follow forward, loss and backward of a module on fake tensors: needs no memory, takes seconds."""
    objective = objective_of(loss, count)
    return remember(capture_module(model, batch, objective, precision=precision), model, batch, objective)


def search(
    graph: Graph,
    cluster: Cluster,
    *,
    global_batch: int | None = None,
    memory: str | int | None = None,
    world: int | None = None,
    recipe: Recipe | None = None,
    **fixed: Any,
) -> SearchResult:
    """The best plan for a graph on a cluster, as `mw.plan` searches it. Parts of the plan can be fixed by name: `zero=2`,
    `precision="bf16"`. Shardings are tried on the model where it was captured in this process."""
    asked = request_of({"global_batch": global_batch, **fixed}, search).fixed  # type: ignore[arg-type]
    return search_plan(graph, cluster, memory=memory, devices=world, recipe=recipe, **asked)


def plain_plan(request: PlanRequest, graph: Graph, world: int, cluster: str) -> Plan:
    """The request with plain defaults: all ranks data parallel, one microbatch, nothing sharded or recomputed. Shardings are tried
    on the model where it was captured in this process."""
    return settled(plan_plainly(request, graph, world, cluster))


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: Optimizer | OptimizerFactory,
    loss: Loss | None = None,
    count: Count | None = None,
    clip_norm: float | None = None,
    record: bool = True,
    find_nan: bool = False,
    check: bool = True,
    sample_seed: int | None = None,
) -> Program:
    """Spread a module over the running ranks as the plan says, under torchrun, the same file on every rank.

    loss: (output, batch) → mean loss; without it, cross-entropy against `labels`. count: how many things that mean runs
    over (label tokens by default), so that uneven microbatches are weighted right. record: watch one early step.
    find_nan: look at every block in every step; a loss that is not finite then ends the step with an error that names the
    block that made the first such value, in forward or backward, and its rank. Slow.
    check: where the plan divides the model (tp, cp, pp, ep, sharded offload), the first step is preceded by a comparison of a
    small copy with one process, in float64 on this host; a difference is an error that names the first tensor. Once for a
    model and plan.
    sample_seed: random numbers of a forward (dropout) depend on this seed, the step, the sample and the place in the sample, so
    that every plan draws the same ones; without it, each rank draws from its own generator. A resumed loop of your own sets
    `program.first_step`.
    """
    recorder = StepRecorder() if record else None
    first = FirstBatch(model, plan, objective_of(loss, count)) if check else None
    program = apply_plan(
        model,
        plan,
        optimizer=optimizer,
        objective=objective_of(loss, count),
        max_norm=clip_norm,
        recorder=recorder,
        find_nan=find_nan,
        sample_seed=sample_seed,
    )
    program.before_first_step = first.check if first is not None else None
    return program


def wrap(
    model: nn.Module, optimizer: Optimizer, plan: Plan, device: torch.device | None = None, *, check: bool = True
) -> tuple[nn.Module, Optimizer]:
    """For people who keep their own loop: forward, `loss.backward()` and `optimizer.step()` stay as they were.

    check: as of `apply`, before the first forward that trains; what the model returns is compared, since the loss is yours.
    """
    first = FirstBatch(model, plan, None) if check else None
    module, optimizer = wrap_plan(model, optimizer, plan, device)
    if first is not None and first.is_wanted:
        _before_first_forward(module, first)
    return module, optimizer


def _before_first_forward(module: nn.Module, first: FirstBatch) -> None:
    def see(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            handle.remove()
            first.check_call(arguments, options)

    handle = module.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
