"""A module and a plan that streams its parameters → a streamed Program: every block moves to its home on the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.core.errors import InputError, PlanError
from meshwright.core.names import is_list_item
from meshwright.core.plan import Plan
from meshwright.models.head_loss import postpone_logits
from meshwright.models.objective import Objective
from meshwright.runtime.batch_norm import sync_batch_norms
from meshwright.runtime.compile import compile_blocks
from meshwright.runtime.deferred import materialise
from meshwright.runtime.mesh import build_mesh, check_model, check_precision, check_same_plan
from meshwright.runtime.offload.block_home import BlockHome, Member, find_members
from meshwright.runtime.offload.departures import Departures
from meshwright.runtime.offload.disk_state import NUM_STAGED, DiskState, state_keys
from meshwright.runtime.offload.host import HostMemory, check_host_memory, padded
from meshwright.runtime.offload.host_updates import NUM_BUFFERS, HostUpdates, InMemory, StatePlace
from meshwright.runtime.offload.link import Link, open_link
from meshwright.runtime.offload.resident import Resident
from meshwright.runtime.offload.rules import is_plain_adam
from meshwright.runtime.offload.stash import DeviceStash, HostStash, Stash
from meshwright.runtime.offload.streamed_program import StreamedProgram, Streams
from meshwright.runtime.offload.streaming import Streaming
from meshwright.runtime.offload.threads import num_threads, ranks_here
from meshwright.runtime.offload.window import Window
from meshwright.runtime.optimizer import OptimizerFactory, check_optimizer, make_optimizer, named_parameters
from meshwright.runtime.places import Place, note_place
from meshwright.runtime.precision import LOWER, STORED, store
from meshwright.runtime.program import Spread
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
    host_link: float | None = None,
) -> StreamedProgram:
    """host_link: bytes a second of the link's stand-in where the device is a CPU."""
    check_same_plan(plan)
    check_optimizer(optimizer, plan)
    mesh = build_mesh(plan, device)
    check_model(module, plan)
    sync_batch_norms(module, plan, mesh)
    check_precision(module, plan)
    before = named_parameters(module) if isinstance(optimizer, Optimizer) else {}
    store(module, plan, CPU)
    group = mesh.get_group("dp") if plan.mesh.dp > 1 else None
    homes = _homes(module, plan)
    memory = _Memory(homes, plan, device, clips=max_norm is not None)
    try:
        place = _move_in(module, homes, memory, lambda: _sample(optimizer), device, group)
        resident = _stay(module, homes, plan, device, group)
        compile_blocks(module, plan)
        postpone_logits(module, plan.compile)
        made = make_optimizer(optimizer, module, before)
        check_optimizer(made, plan)
        if isinstance(place, InMemory) and is_plain_adam(made):
            place = InMemory(memory.for_moments())
    except BaseException:
        memory.close()
        raise
    if isinstance(place, DiskState):
        place.optimizer = made
        place.commit()
    link = open_link(device, host_link)
    streaming = Streaming(
        module, homes, resident, Window(homes, plan.offload.window, link, device, group), link, device
    )
    streams = Streams(
        streaming=streaming,
        departures=Departures(homes, STORED[plan.precision], device, link, group),
        updates=HostUpdates(made, memory.buffers(), max_norm is not None, place, num_threads(ranks_here())),
        stash=_stash(plan, link, device, len(homes)),
        memory=(memory.pinned, memory.plain),
        group=group,
    )
    module.register_load_state_dict_post_hook(lambda *_: streaming.refresh())
    return StreamedProgram(Spread(module, made, mesh), plan, objective, max_norm, watch, streams)


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


class _Memory:
    """The host's memory of a streamed program: for working copies and gradients, and for masters."""

    def __init__(self, homes: dict[str, BlockHome], plan: Plan, device: torch.device, clips: bool) -> None:
        self.homes, self.plan = homes, plan
        self.stored, self.working = STORED[plan.precision], working_dtype(plan)
        self.num_buffers = len(homes) if clips else min(NUM_BUFFERS, len(homes))
        self.largest = max(home.num_sent if plan.mesh.dp > 1 else home.local_elements for home in homes.values())
        pinned = sum(home.num_bytes(self.working.itemsize) for home in homes.values())
        pinned += self.num_buffers * padded(self.largest * self.stored.itemsize)
        masters = sum(home.num_bytes(self.stored.itemsize) for home in homes.values())
        on_disk = plan.offload.where == "disk"
        self.shares = self.stored == self.working and not on_disk
        """Whether masters and working copies are the same."""
        plain = 0 if self.shares or on_disk else masters
        states = NUM_STAGED * padded(self.largest * self.stored.itemsize) if on_disk else ASSUMED_STATES * masters
        here = ranks_here()
        what = f"streaming the parameters of {len(homes)} blocks"
        check_host_memory((pinned + plain + states) * here, f"{what}, with what the optimizer keeps for them,")
        self.pinned = HostMemory(pinned, device, what, here)
        self.plain = HostMemory(plain, CPU, what, here)

    def move_in(self, home: BlockHome) -> None:
        working = self.pinned.take(home.local_elements, self.working)
        if self.plan.offload.where == "disk":  # they have no memory until they have a place there
            master = torch.empty(home.local_elements, dtype=self.stored)
        else:
            master = working if self.shares else self.plain.take(home.local_elements, self.stored)
        home.move_in(working, master)

    def for_moments(self) -> HostMemory:
        """For what Adam keeps; of another optimizer it is not known what it will."""
        sizes = (shape.numel() * self.stored.itemsize for home in self.homes.values() for shape in home.local_shapes)
        return HostMemory(ASSUMED_STATES * sum(map(padded, sizes)), CPU, "the state of the optimizer", ranks_here())

    def buffers(self) -> list[Tensor]:
        """For gradients that arrive."""
        return [self.pinned.take(self.largest, self.stored) for _ in range(self.num_buffers)]

    def close(self) -> None:
        self.pinned.close()
        self.plain.close()


def _move_in(
    module: nn.Module,
    homes: dict[str, BlockHome],
    memory: _Memory,
    optimizer: Callable[[], Optimizer],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> StatePlace:
    """Every block to its home, one after the other: of a deferred model, no more than one is elsewhere at a time."""
    place = None
    for name, home in homes.items():
        materialise(module.get_submodule(name))
        values = [_own_part(member, device, group) for member in home.members]
        memory.move_in(home)
        if memory.plan.offload.where == "host":
            home.fill(values)
            continue
        if place is None:
            place = _on_disk(homes, memory, state_keys(optimizer()))
        place.place_first(home, values)
    return place or InMemory()


def _on_disk(homes: dict[str, BlockHome], memory: _Memory, keys: tuple[str, ...]) -> DiskState:
    folder = Path(memory.plan.offload.folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; make it, or name another in offload.folder")
    own = folder / f"rank-{dist.get_rank()}"
    own.mkdir(exist_ok=True)
    return DiskState(own, homes, memory.stored, keys)


def _own_part(member: Member, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
    """What this rank holds of a parameter; the first rank's values count."""
    value = member.parameter.detach()
    if group is None:
        return value
    whole = value.to(device)
    dist.broadcast(whole, group=group, group_src=0)
    return whole.chunk(member.parts)[group.rank()] if member.parts > 1 else whole


def _stay(
    module: nn.Module,
    homes: dict[str, BlockHome],
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Resident:
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
    return Resident(module, streamed, working_dtype(plan))


def working_dtype(plan: Plan) -> torch.dtype:
    return LOWER.get(plan.precision, STORED[plan.precision])


def _sample(optimizer: Optimizer | OptimizerFactory) -> Optimizer:
    """One of its kind, to see what it keeps."""
    return optimizer if isinstance(optimizer, Optimizer) else optimizer([nn.Parameter(torch.zeros(1))])


def _stash(plan: Plan, link: Link, device: torch.device, num_blocks: int) -> Stash:
    if plan.offload.stash == "device":
        return DeviceStash()
    return HostStash(link, device, num_blocks * plan.num_microbatches)
