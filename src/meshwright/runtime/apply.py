"""`apply` turns a module and a plan into a Program; `wrap` does the same for people who keep their own loop."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.models.experts import find_experts
from meshwright.models.objective import DEFAULT, Objective
from meshwright.models.old_norms import without_computed_weights
from meshwright.rules.limits import check_runs
from meshwright.runtime.batch_norm import sync_batch_norms
from meshwright.runtime.communicators import data_mesh, noted
from meshwright.runtime.compile import compile_blocks, compile_loss
from meshwright.runtime.data_parallel import agree_on_values, inner, spread
from meshwright.runtime.deferred import check_can_be_divided, divides, materialise, materialise_hidden
from meshwright.runtime.draws.program import SampleDraws, check_draws
from meshwright.runtime.experts import spread_experts
from meshwright.runtime.lowered import lower
from meshwright.runtime.mesh import build_mesh, check_model, check_precision, check_same_plan, local_device
from meshwright.runtime.nan import NanFinder
from meshwright.runtime.offload.activations import offload_activations
from meshwright.runtime.offload.build import stream
from meshwright.runtime.offload.link import open_link
from meshwright.runtime.offload.optimizer import HostOptimizer, step_on_host
from meshwright.runtime.offload.threads import ranks_here
from meshwright.runtime.optimizer import OptimizerFactory, check_optimizer, make_optimizer, named_parameters
from meshwright.runtime.own_backward import check_hooks
from meshwright.runtime.own_loop.limits import check_holds_all, refuse_copies
from meshwright.runtime.own_loop.loop import OwnLoop
from meshwright.runtime.pipeline.cut import cut
from meshwright.runtime.pipeline.draw import draw
from meshwright.runtime.pipeline.pipeline import Pipeline
from meshwright.runtime.precision import compute_context, store
from meshwright.runtime.program import Program, Spread
from meshwright.runtime.ranks import join
from meshwright.runtime.recompute import mark_recompute
from meshwright.runtime.split.model import split_model
from meshwright.runtime.split.own_rows import run_on_own_rows
from meshwright.runtime.state_dicts import mark_states
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
    find_nan: bool = False,
    host_link: float | None = None,
    sample_seed: int | None = None,
) -> Program:
    """Spread a module over the running ranks as the plan says. The module itself is changed.

    find_nan: look at every block in every step, so that a loss that is not finite is traced to its origin; slow.
    host_link: bytes a second that a CPU's stand-in for the link between device and host moves each way; without it, all it can.
    sample_seed: draw random numbers by sample from this seed, the same under every plan; without it, from each rank's generator.
    """
    watch = Watch(recorder)
    _check_divisible(module, plan)
    materialise_hidden(module)
    with noted() as groups:
        if plan.offload.what == "parameters":
            check_runs(plan)
            check_hooks(module, plan)
            _check_not_traced(find_nan)
            if sample_seed is not None:
                check_draws(plan)
            program: Program = stream(
                module, plan, optimizer, objective, max_norm, watch, device or join().device, host_link
            )
        else:
            device = device or join().device
            draws = None if sample_seed is None else SampleDraws(module, plan, device, sample_seed)
            found = _spread(module, plan, optimizer, device, watch, objective)
            host = _offload(found, plan, host_link, max_norm)
            finder = NanFinder(inner(found.module), plan, dist.get_rank()) if find_nan else None
            program = Program(found, plan, compile_loss(objective, plan), max_norm, watch, finder, host, draws)
    program.groups = groups
    return program


def _check_divisible(module: nn.Module, plan: Plan) -> None:
    if divides(plan) or plan.mesh.cp > 1:
        check_can_be_divided(module)


def _check_not_traced(find_nan: bool) -> None:
    if find_nan:
        raise PlanError(
            "find_nan looks at the gradients of every block, and those of streamed parameters have left for the host: leave it "
            "out, or look for the origin with a plan that keeps parameters on the device (offload none or optimizer)"
        )


def wrap(
    module: nn.Module, optimizer: Optimizer, plan: Plan, device: torch.device | None = None
) -> tuple[nn.Module, Optimizer]:
    """The same module and optimizer, spread; forward, `loss.backward()` and `optimizer.step()` stay as they were.

    The plan's `num_microbatches` backward passes make one step: ranks reduce gradients in the last of them, and
    `optimizer.step()` in between is refused. Divide each loss by their number, as with plain torch.
    """
    if plan.precision == "fp16":
        raise PlanError("fp16 scales the loss, which with wrap is your own loop's: use apply, or bf16")
    if plan.mesh.pp > 1:
        raise PlanError(
            f"the plan has pp={plan.mesh.pp}: one forward and backward are not the order of its stages; use apply(...).step, or "
            "a plan without stages"
        )
    if plan.offload.what == "parameters":
        raise PlanError("a plan that streams its parameters runs backward block by block: use apply(...).step")
    check_holds_all(module, optimizer, plan)
    _check_divisible(module, plan)
    found = _spread(module, plan, optimizer, device, Watch(None), DEFAULT)
    refuse_copies(found.module)
    loop = OwnLoop(found.module, plan, found.mesh, found.split)
    found.module.register_forward_pre_hook(loop.before_forward, prepend=True)
    found.module.register_forward_hook(loop.after_forward)
    host = _offload(found, plan, is_own_loop=True)
    if host is None:
        found.optimizer.register_step_pre_hook(loop.before_update)
        found.optimizer.register_step_post_hook(loop.after_update)
    else:
        step_on_host(found.optimizer, host, loop.before_update, loop.after_update)
    context = compute_context(plan, torch.device(found.mesh.device_type), found.split.splitter if found.split else None)
    found.module.forward = loop.around(found.module.forward, context)
    loop.parts.mark_parameters()
    return found.module, found.optimizer


def _offload(
    found: Spread, plan: Plan, host_link: float | None = None, max_norm: float | None = None, is_own_loop: bool = False
) -> HostOptimizer | None:
    """What updates on the host, where the plan says so."""
    if plan.offload.what == "none":
        return None
    device = local_device(found.mesh)
    link = open_link(device, host_link)
    return HostOptimizer(
        inner(found.module), found.optimizer, plan, link, device, found.values, max_norm, is_own_loop,
        ranks_here(),
    )  # fmt: skip


def _spread(
    module: nn.Module,
    plan: Plan,
    optimizer: Optimizer | OptimizerFactory,
    device: torch.device | None,
    watch: Watch,
    objective: Objective,
) -> Spread:
    device = device or join().device
    check_same_plan(plan)
    check_runs(plan)
    check_optimizer(optimizer, plan)
    mesh = build_mesh(plan, device)
    check_model(module, plan)
    check_precision(module, plan)
    check_hooks(module, plan)
    without_computed_weights(module)
    before = named_parameters(module)
    values = lower(module, plan, device) if plan.stores_16_bits else None
    if values is None:
        store(module, plan, device)
    agree_on_values(module, plan)
    sketch = draw(module, plan, device) if plan.mesh.pp > 1 else None  # of the whole module, before anything is cut
    split = split_model(module, plan, mesh)
    spread_experts(module, plan, mesh)
    if split is not None:
        run_on_own_rows(module, find_experts(module), split.splitter)
    sync_batch_norms(module, plan, mesh)
    found = cut(module, plan, sketch, mesh.get_local_rank("pp")) if sketch else None
    mark_recompute(module, plan, watch)
    offload_activations(module, plan, device)
    compile_blocks(module, plan)  # after recompute, which belongs inside a compiled block
    pipeline = None
    if sketch is not None and found is not None:
        materialise(module)
        pipeline = Pipeline(module, plan, data_mesh(plan, mesh), sketch, found, objective)
        spread_module = module
    elif values is not None:
        spread_module = module
    else:
        spread_module = spread(module, plan, data_mesh(plan, mesh))  # last: it must see the tensors made above
    if split is not None and plan.zero:
        split.carry_notes()
    made = make_optimizer(optimizer, module, before)
    check_optimizer(made, plan)
    if values is None:
        mark_states(module, made, mesh)
    return Spread(spread_module, made, mesh, split, pipeline, values)
