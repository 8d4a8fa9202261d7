"""A module and a plan that streams its parameters → a streamed Program: every block moves to its home on the host."""

from __future__ import annotations

import os
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.core.errors import PlanError
from meshwright.core.names import is_list_item
from meshwright.core.plan import Plan
from meshwright.core.schedules import make_schedule
from meshwright.models.head_loss import postpone_logits
from meshwright.models.objective import Objective
from meshwright.runtime.compile import compile_blocks
from meshwright.runtime.deferred import materialise
from meshwright.runtime.mesh import build_mesh, check_model, check_precision, check_same_plan
from meshwright.runtime.offload.block_home import BlockHome, Member, find_members
from meshwright.runtime.offload.departures import Departures
from meshwright.runtime.offload.host import HostMemory, check_host_memory, padded
from meshwright.runtime.offload.host_updates import NUM_BUFFERS, HostUpdates
from meshwright.runtime.offload.kept import Kept
from meshwright.runtime.offload.link import Link, open_link
from meshwright.runtime.offload.stash import DeviceStash, HostStash, Stash
from meshwright.runtime.offload.streamed_program import StreamedProgram, Streams
from meshwright.runtime.offload.streaming import Streaming
from meshwright.runtime.offload.window import Window
from meshwright.runtime.optimizer import OptimizerFactory, check_optimizer, make_optimizer, named_parameters
from meshwright.runtime.places import Place, note_place
from meshwright.runtime.precision import LOWER, STORED, store
from meshwright.runtime.watch import Watch

ASSUMED_STATES = 2
"""Tensors that an optimizer keeps for a parameter, as Adam does: they are made in its first step, and counted before."""
CPU = torch.device("cpu")


def stream(
    module: nn.Module,
    plan: Plan,
    optimizer: Optimizer | OptimizerFactory,
    objective: Objective,
    max_norm: float | None,
    watch: Watch,
    device: torch.device,
) -> StreamedProgram:
    check_same_plan(plan)
    check_optimizer(optimizer, plan)
    mesh = build_mesh(plan, device)
    check_model(module, plan)
    check_precision(module, plan)
    before = named_parameters(module) if isinstance(optimizer, Optimizer) else {}
    store(module, plan, CPU)
    group = mesh.get_group("dp") if plan.mesh.dp > 1 else None
    homes = _homes(module, plan)
    memory = _move_in(module, homes, plan, device, group, clips=max_norm is not None)
    kept = _keep(module, homes, plan, device, mesh, group)
    compile_blocks(module, plan)
    postpone_logits(module)
    link = open_link(device)
    streaming = Streaming(module, homes, kept, Window(homes, plan.offload.window, link, device, group), link, device)
    made = make_optimizer(optimizer, module, before)
    check_optimizer(made, plan)
    streams = Streams(
        streaming=streaming,
        departures=Departures(homes, STORED[plan.precision], device, link, group),
        updates=HostUpdates(made, _buffers(homes, plan, memory[0], max_norm is not None), max_norm is not None),
        stash=_stash(plan, link, device, len(homes)),
        memory=memory,
        group=group,
    )
    module.register_load_state_dict_post_hook(lambda *_: streaming.refresh())
    schedule = make_schedule(plan.schedule, plan.mesh.pp, plan.num_microbatches, plan.virtual)
    return StreamedProgram(module, made, plan, schedule, mesh, objective, max_norm, watch, streams)


def _homes(module: nn.Module, plan: Plan) -> dict[str, BlockHome]:
    repeated = [name for name in plan.blocks if is_list_item(name)]
    members = find_members(module, repeated, plan.mesh.dp)
    homes = {name: BlockHome(name, found) for name, found in members.items() if found}
    if not homes:
        raise PlanError("the model has no repeated blocks with parameters to stream: set offload to none or optimizer")
    for member in chain.from_iterable(home.members for home in homes.values()):
        if member.parts > 1:
            note_place(module, member.names[0], Place("dp", 0))
    return homes


def _move_in(
    module: nn.Module,
    homes: dict[str, BlockHome],
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup | None,
    clips: bool,
) -> tuple[HostMemory, ...]:
    """Every block to its home, one after the other: of a deferred model, no more than one is elsewhere at a time."""
    stored, working = STORED[plan.precision], _working(plan)
    pinned_bytes = sum(home.num_bytes(working.itemsize) for home in homes.values())
    pinned_bytes += _num_buffers(homes, clips) * _buffer_bytes(homes, stored)
    plain_bytes = 0 if stored == working else sum(home.num_bytes(stored.itemsize) for home in homes.values())
    states = ASSUMED_STATES * sum(home.local_elements for home in homes.values() if home.trainable) * stored.itemsize
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    what = f"streaming the parameters of {len(homes)} blocks"
    check_host_memory((pinned_bytes + plain_bytes + states) * here, f"{what}, with what the optimizer keeps for them,")
    pinned = HostMemory(pinned_bytes, device, what, here)
    try:
        plain = HostMemory(plain_bytes, CPU, what, here)
        for name, home in homes.items():
            materialise(module.get_submodule(name))
            home.move_in([_own_part(member, device, group) for member in home.members], pinned, plain, working)
    except BaseException:
        pinned.close()
        raise
    return pinned, plain


def _own_part(member: Member, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
    """What this rank holds of a parameter; the first rank's values count."""
    value = member.parameter.detach()
    if group is None:
        return value
    whole = value.to(device)
    dist.broadcast(whole, group=group, group_src=0)
    return whole.chunk(member.parts)[group.rank()] if member.parts > 1 else whole


def _keep(
    module: nn.Module,
    homes: dict[str, BlockHome],
    plan: Plan,
    device: torch.device,
    mesh: DeviceMesh,
    group: dist.ProcessGroup | None,
) -> Kept:
    """All else, on the device."""
    materialise(module)
    streamed = {id(master) for home in homes.values() for master in home.masters}
    for parameter in module.parameters():
        if id(parameter) not in streamed:
            parameter.data = parameter.data.to(device)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)
    if group is not None:
        apart = [one for one in (*module.parameters(), *module.buffers()) if id(one) not in streamed]
        for tensor in apart:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
    return Kept(module, streamed, _working(plan))


def _working(plan: Plan) -> torch.dtype:
    return LOWER.get(plan.precision, STORED[plan.precision])


def _num_buffers(homes: dict[str, BlockHome], clips: bool) -> int:
    return len(homes) if clips else min(NUM_BUFFERS, len(homes))


def _buffer_bytes(homes: dict[str, BlockHome], stored: torch.dtype) -> int:
    return padded(max(home.local_elements for home in homes.values()) * stored.itemsize)


def _buffers(homes: dict[str, BlockHome], plan: Plan, pinned: HostMemory, clips: bool) -> list[Tensor]:
    """For gradients that arrive."""
    size = max(home.local_elements for home in homes.values())
    return [pinned.take(size, STORED[plan.precision]) for _ in range(_num_buffers(homes, clips))]


def _stash(plan: Plan, link: Link, device: torch.device, num_blocks: int) -> Stash:
    if plan.offload.stash == "device":
        return DeviceStash()
    return HostStash(link, device, num_blocks * plan.num_microbatches)
