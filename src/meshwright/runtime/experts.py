"""Expert parallelism: each of ep ranks holds E/ep experts, and tokens travel to the experts their router chose.

The ep ranks of a group are neighbours along dp: dp coordinates ep·g … ep·(g+1) - 1. Ranks with the same place in their groups
hold the same experts and are data parallel replicas of each other for them: dp/ep of them.         -> expert_groups

Any module is taken that keeps its experts in stacked parameters [E, …] and is called as transformers calls its own:

    forward(rows [N, H], chosen experts [N, k], their weights [N, k]) → [N, H]       index E: a choice that was dropped

Its forward is replaced by: sort the (token, choice) pairs by expert; tell every rank how many rows each of its experts gets
(E int64); send the rows; run the module's own forward on what came, each row with one local expert and weight 1; send
the results back; weight them and add them up over k. Dropped choices are not sent. Backward sends gradients the other way;
a forward that is redone sends everything again.

Scale: data parallelism averages the gradients of dp ranks. An expert gets the gradients of all ep ranks of its group, added
up, and is averaged over dp/ep ranks. So gradients enter the experts times 1/ep and leave them times ep.  -> _Exchange
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.errors import ModelError, PlanError
from meshwright.core.plan import Plan
from meshwright.models.experts import find_experts
from meshwright.rules.divisors import check_experts
from meshwright.runtime.communicators import expert_groups
from meshwright.runtime.places import Place, note_place

NOTE = "_meshwright_experts"


@dataclass(frozen=True)
class ExpertSpread:
    """How the experts of a module lie over ranks; noted on the module."""

    ep: dist.ProcessGroup
    """The ranks that share the experts out. A group of its own, also where it has the ranks of another."""
    ranks: DeviceMesh
    """All ranks, dp in two directions: along ep, and along "replicas", those that hold the same experts."""
    names: tuple[str, ...]
    """Modules of experts."""

    @property
    def replicas(self) -> DeviceMesh:
        """The dp/ep · cp ranks that hold the same experts."""
        return self.ranks["replicas"]

    @property
    def mesh(self) -> DeviceMesh:
        """This rank's ep group and beside it those that hold the same experts: ("ep", "replicas")."""
        return self.ranks["ep", "replicas"]


def expert_spread_of(module: nn.Module) -> ExpertSpread | None:
    """None: experts, if there are any, are whole on every rank."""
    found: ExpertSpread | None = vars(module).get(NOTE)
    return found


def expert_parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that lie over ep, by their names in the module."""
    spread = expert_spread_of(module)
    return {
        f"{name}.{own}": parameter
        for name in (spread.names if spread else ())
        for own, parameter in module.get_submodule(name).named_parameters()
    }


def spread_experts(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Leave each rank its share of the experts. The module itself is changed."""
    ep = plan.mesh.ep
    if ep == 1:
        return
    found = find_experts(module)
    if not found:
        raise PlanError(f"ep={ep}, but the model has no experts in stacked parameters: set ep to 1")
    check_experts(found.values(), plan.mesh)
    group, ranks = expert_groups(plan, mesh.device_type)
    vars(module)[NOTE] = ExpertSpread(group, ranks, tuple(found))
    for name, count in found.items():
        _keep_share(module, name, group)
        _send_tokens(module.get_submodule(name), count, group)


def _keep_share(module: nn.Module, name: str, ep: dist.ProcessGroup) -> None:
    part = module.get_submodule(name)
    for own, parameter in list(part.named_parameters()):
        share = parameter.detach().chunk(ep.size())[ep.rank()].clone()
        part.register_parameter(own, nn.Parameter(share, requires_grad=parameter.requires_grad))
        note_place(module, f"{name}.{own}", Place("ep", 0))


def _send_tokens(part: nn.Module, num_experts: int, group: dist.ProcessGroup) -> None:
    if getattr(part, "num_experts", None) == num_experts:  # modules of this interface read it for their stacked weights
        vars(part)["num_experts"] = num_experts // group.size()
    part.forward = _exchanged(part, part.forward, num_experts, group)


def _exchanged(
    part: nn.Module, forward: Callable[..., Tensor], num_experts: int, group: dist.ProcessGroup
) -> Callable[..., Tensor]:
    ep, exchange = group.size(), cast(Callable[..., Tensor], _Exchange.apply)

    @wraps(forward)
    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        _check_call(part, hidden_states, top_k_index, top_k_weights)
        chosen = top_k_index.flatten()
        counts = chosen.bincount(minlength=num_experts + 1)[:num_experts]
        coming = torch.empty_like(counts)  # by rank, then by expert of this rank
        dist.all_to_all_single(coming, counts.contiguous(), group=group)
        sent, received = (each.view(ep, -1).sum(1).tolist() for each in (counts, coming))
        order = chosen.argsort(stable=True)[: sum(sent)]  # by expert; what was dropped comes last
        tokens = order // top_k_index.shape[1]
        rows = exchange(hidden_states[tokens], sent, received, group, float(ep))
        made = _run_local(part, forward, rows, coming, ep)
        back = exchange(made, received, sent, group, 1 / ep)
        weighted = back * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, tokens, weighted.to(hidden_states.dtype))

    return run


def _check_call(part: nn.Module, hidden_states: Tensor, index: Tensor, weights: Tensor) -> None:
    if hidden_states.dim() != 2 or index.shape != weights.shape or len(index) != len(hidden_states):
        shapes = ", ".join(str(list(each.shape)) for each in (hidden_states, index, weights))
        raise ModelError(
            f"{type(part).__name__} was called with {shapes}: experts over ep are called with rows [N, H], chosen experts "
            "[N, k] and weights [N, k]; set ep to 1"
        )


def _run_local(part: nn.Module, forward: Callable[..., Tensor], rows: Tensor, coming: Tensor, ep: int) -> Tensor:
    """The module's own forward on the rows that came."""
    if not len(rows):
        return cast(Callable[..., Tensor], _Nothing.apply)(rows, *part.parameters())
    own = torch.arange(len(coming) // ep, device=rows.device).repeat(ep).repeat_interleave(coming)
    return forward(rows, own[:, None], rows.new_ones(len(rows), 1))


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, in the order of ranks; backward sends their gradients back, times a scale."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, scale: float
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group, ctx.scale = sent, received, group, scale
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group).mul_(ctx.scale), None, None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _Nothing(torch.autograd.Function):
    """No rows came. The gradients are zero, but they are there: other ranks wait for them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return rows.new_empty(rows.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
