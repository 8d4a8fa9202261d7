"""`apply` turns a module and a plan into a Program; `wrap` does the same for people who keep their own loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from meshwright.core.errors import PlanError
from meshwright.core.limits import check_runs
from meshwright.core.plan import Plan
from meshwright.core.schedules import make_schedule
from meshwright.models.objective import DEFAULT, Objective
from meshwright.runtime.compile import compile_blocks, compile_loss
from meshwright.runtime.data_parallel import give_up_gathered, prepare_microbatch, spread, without_gradient
from meshwright.runtime.mesh import build_mesh, check_model, check_precision, check_same_plan
from meshwright.runtime.optimizer import OptimizerFactory, make_optimizer, named_parameters
from meshwright.runtime.pipeline.cut import cut
from meshwright.runtime.pipeline.draw import draw
from meshwright.runtime.pipeline.pipeline import Pipeline
from meshwright.runtime.precision import compute_context, store
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import join
from meshwright.runtime.recompute import mark_recompute
from meshwright.runtime.watch import Recorder, Watch


def apply(
    module: nn.Module,
    plan: Plan,
    *,
    optimizer: Optimizer | OptimizerFactory,
    objective: Objective = DEFAULT,
    max_norm: float | None = None,
    recorder: Recorder | None = None,
    device: torch.device | None = None,
) -> Program:
    """Spread a module over the running ranks as the plan says. The module itself is changed."""
    watch = Watch(recorder)
    spread = _spread(module, plan, optimizer, device, watch, objective)
    schedule = make_schedule(plan.schedule, plan.mesh.pp, plan.num_microbatches, plan.virtual)
    compiled = compile_loss(objective, plan)
    return Program(
        spread.module, spread.optimizer, plan, schedule, spread.mesh, compiled, max_norm, watch, spread.pipeline
    )


def wrap(
    module: nn.Module, optimizer: Optimizer, plan: Plan, device: torch.device | None = None
) -> tuple[nn.Module, Optimizer]:
    """The same module and optimizer, spread; forward, `loss.backward()` and `optimizer.step()` stay as they were.

    The plan's `num_microbatches` backward passes make one step: ranks reduce gradients in the last of them, and
    `optimizer.step()` in between is refused. Divide each loss by their number, as with plain torch.
    """
    if plan.mesh.pp > 1:
        raise PlanError(
            f"the plan has pp={plan.mesh.pp}: one forward and backward are not the order of its stages; use apply(...).step, or "
            "a plan without stages"
        )
    found = _spread(module, plan, optimizer, device, Watch(None), DEFAULT)
    counter = _MicrobatchCounter(found.module, plan)
    found.module.register_forward_pre_hook(counter.before_forward)
    found.optimizer.register_step_pre_hook(counter.before_update)
    context = compute_context(plan, torch.device(found.mesh.device_type))
    found.module.forward = _inside(context, found.module.forward)
    return found.module, found.optimizer


class _Spread(NamedTuple):
    module: nn.Module
    optimizer: Optimizer
    mesh: DeviceMesh
    pipeline: Pipeline | None


def _spread(
    module: nn.Module,
    plan: Plan,
    optimizer: Optimizer | OptimizerFactory,
    device: torch.device | None,
    watch: Watch,
    objective: Objective,
) -> _Spread:
    device = device or join().device
    check_same_plan(plan)
    check_runs(plan)
    mesh = build_mesh(plan, device)
    check_model(module, plan)
    check_precision(module, plan)
    before = named_parameters(module)
    store(module, plan, device)
    sketch = draw(module, plan, device) if plan.mesh.pp > 1 else None  # of the whole module, before anything is cut
    found = cut(module, plan, sketch, mesh.get_local_rank("pp")) if sketch else None
    mark_recompute(module, plan, watch)
    compile_blocks(module, plan)  # after recompute, which belongs inside a compiled block
    pipeline = None
    if sketch is not None and found is not None:
        pipeline = Pipeline(module, plan, mesh, sketch, found, objective)
        spread_module = module
    else:
        spread_module = spread(module, plan, mesh)  # last: it must see the tensors the steps above made
    return _Spread(spread_module, make_optimizer(optimizer, module, before), mesh, pipeline)


class _MicrobatchCounter:
    """Counts training forwards between updates, and tells data parallelism which backward is the last."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = module
        self.plan = plan
        self.done = 0

    def before_forward(self, module: nn.Module, arguments: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.done += 1
            prepare_microbatch(self.module, self.plan, is_last=self.done % self.plan.num_microbatches == 0)

    def before_update(self, *_: Any) -> None:
        if self.done % self.plan.num_microbatches:
            raise PlanError(
                f"optimizer.step() after {self.done} of {self.plan.num_microbatches} microbatches: their gradients are not "
                "reduced yet; run all of them first, or set num_microbatches in the plan"
            )
        self.done = 0
        self._check_used()
        give_up_gathered(self.module)  # a forward without training in between may have left them

    def _check_used(self) -> None:
        unused = without_gradient(self.module) if isinstance(self.module, DistributedDataParallel) else []
        if unused:
            raise PlanError(
                f"parameter '{unused[0]}' got no gradient: replicas would wait for it; freeze it with requires_grad_(False), "
                "or use ZeRO 1, 2 or 3"
            )


def _inside(context: Callable[[], Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        with context():
            return forward(*arguments, **options)

    return run
