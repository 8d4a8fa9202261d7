"""The named grid of ranks a plan asks for, and the checks that belong at its door."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.axes import RANK_AXES, Axis
from meshwright.core.errors import PlanError, nearest
from meshwright.core.graph import identity
from meshwright.core.plan import Plan
from meshwright.models.parameters import list_parameters
from meshwright.runtime.communicators import axes_mesh
from meshwright.runtime.experts import expert_spread_of
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.standing import name_world


def build_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """Ranks by axis, pp outermost and tp innermost: neighbours share a host."""
    check_world(plan)
    mesh = axes_mesh(plan, device.type)
    name_world(next((axis for axis in RANK_AXES if plan.mesh.degrees[axis] == plan.world), "all ranks"))
    return mesh


def local_device(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def axis_groups(module: nn.Module, mesh: DeviceMesh) -> dict[Axis, dist.ProcessGroup]:
    """This rank's group along each axis; ep where the module's experts lie over it."""
    experts = expert_spread_of(module)
    found: dict[Axis, dist.ProcessGroup] = {"ep": experts.ep} if experts else {}
    return {**found, **{axis: mesh.get_group(axis) for axis in reversed(RANK_AXES)}}


def check_world(plan: Plan) -> None:
    world = dist.get_world_size()
    if plan.world != world:
        raise PlanError(
            f"the plan is for {plan.world} ranks, but {world} are running: start {plan.world}, or plan for {world}"
        )


def check_same_plan(plan: Plan) -> None:
    """All ranks must hold the same plan; the odd one out is named."""
    hashes = all_ranks(plan.hash, str)
    usual, _ = Counter(hashes).most_common(1)[0]
    odd = [str(rank) for rank, found in enumerate(hashes) if found != usual]
    if odd:
        raise PlanError(
            f"ranks hold different plans: rank {', '.join(odd)} differs from the others; give all the same file"
        )


def check_model(module: nn.Module, plan: Plan) -> None:
    """A plan made for another model is refused."""
    names = {name for name, _ in module.named_modules(remove_duplicate=False)}
    unknown = [block for block in plan.blocks if block not in names]
    if unknown:
        raise PlanError(
            f"the plan names block '{unknown[0]}', which this model does not have: {nearest(unknown[0], names)}"
        )
    found = identity(list_parameters(module))
    if plan.graph and plan.graph != found:
        raise PlanError(
            f"the plan was made for another model ({plan.model or 'unnamed'}, graph {plan.graph}), this one has graph {found}: "
            "parameters, their shapes, ties or what is trained differ; plan again"
        )


def check_precision(module: nn.Module, plan: Plan) -> None:
    for name, parameter in module.named_parameters():
        if plan.zero and parameter.is_complex():
            raise PlanError(
                f"parameter '{name}' is complex, and ZeRO {plan.zero} shards tensors of one dtype together: use zero 0, or keep it "
                "as a real tensor with a last dim of 2 (torch.view_as_real) and read it with torch.view_as_complex"
            )
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    if plan.zero and plan.precision in ("bf16", "fp16") and any(isinstance(part, norms) for part in module.modules()):
        raise PlanError(
            f"ZeRO {plan.zero} gathers parameters in {plan.precision}, and batch norm cannot mix them with its fp32 statistics: "
            "use zero 0, or fp32"
        )
