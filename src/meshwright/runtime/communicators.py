"""Every communicator of a run is made here: meshes, and groups beside them. `Program.close` takes down those of one program
(`noted`), `dist.destroy_process_group()` all of them.

`init_device_mesh` hands out the default group for an axis that spans the world, and two meshes of the same ranks may share their
groups. That is as good as groups of their own for collectives, which all ranks call in one order. It is not for pipelines:

    a send of NCCL above its buffering ends when the other side has posted the receive
    what two ranks send each other over one group, or one rank sends to several, waits in one queue on the device
    so a rank can stand with a send at the head of its queue whose receive lies behind another rank's send, and so on round

1F1B on one group for both directions waits for itself in this way, and ZB-V even with one group for all that goes down and one
for all that goes up. So each *link*, one way between two coordinates, has a group of these two ranks. Both ends post the messages
of a link in the same order, nothing else is in its queue, and a piece of work waits only for receives: then a send that ends late
holds up nobody, and a schedule that runs with buffered sends, which `tests/pure/legal_schedule.py` proves, runs.
`tests/pure/test_rendezvous.py` plays all schedules over such a transport.

Each rank sets its device before it joins (`runtime/ranks.py`), and that is the device of every group. The default group is not
bound to it by `device_id`: torch then splits each new group off the default one, which all ranks must take part in, also those
that are not in the group (torch 2.13, `_new_process_group_helper`). Where a user's own loop has bound it, all ranks make all links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.core.axes import RANK_AXES
from meshwright.core.plan import Plan
from meshwright.runtime._torch_distributed import forget_meshes

STATE_DIMS = ("replicas", "shards")

Link = tuple[int, int]
"""The pp coordinates a message comes from and goes to."""


_notes: list[list[dist.ProcessGroup]] = []


@contextmanager
def noted() -> Iterator[list[dist.ProcessGroup]]:
    """The groups of this rank that are made meanwhile."""
    made: list[dist.ProcessGroup] = []
    _notes.append(made)
    try:
        yield made
    finally:
        _notes.remove(made)


def take_down(groups: Iterable[dist.ProcessGroup]) -> None:
    """All ranks of a group do so. What still holds one, as parameters under ZeRO do, keeps its connections until it goes too."""
    for group in groups:
        if dist.is_initialized():
            dist.destroy_process_group(group)
    forget_meshes()


def _note(*groups: Any) -> None:
    """Those of which this rank is a member, without the default group."""
    own = [one for one in groups if isinstance(one, dist.ProcessGroup) and one is not dist.group.WORLD]
    for made in _notes:
        made.extend(one for one in own if not any(one is other for other in made))


def _noted_mesh(mesh: DeviceMesh) -> DeviceMesh:
    _note(*mesh.get_all_groups())
    return mesh


def axes_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Ranks by axis, pp outermost and tp innermost: neighbours share a host."""
    degrees = tuple(plan.mesh.degrees[axis] for axis in RANK_AXES)
    return _noted_mesh(init_device_mesh(device_type, degrees, mesh_dim_names=RANK_AXES))


def data_mesh(plan: Plan, mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks with cp counted to dp: along it lie all that hold the same parameters and add up their gradients."""
    if plan.mesh.cp == 1:
        return mesh
    degrees = (plan.mesh.pp, plan.mesh.dp * plan.mesh.cp, plan.mesh.tp)
    return _noted_mesh(init_device_mesh(mesh.device_type, degrees, mesh_dim_names=("pp", "dp", "tp")))


def state_mesh(plan: Plan, mesh: DeviceMesh) -> DeviceMesh:
    """Of a data mesh, its dp as ZeRO sees it: one row, or replicas of sharding groups, the group innermost."""
    replicas = plan.mesh.dp * plan.mesh.cp // plan.shard_degree
    if replicas == 1:
        return mesh["dp"]
    sizes = (plan.mesh.pp, replicas, plan.shard_degree, plan.mesh.tp)
    grid = torch.arange(plan.world).view(sizes).permute(0, 3, 1, 2)
    return _noted_mesh(DeviceMesh(mesh.device_type, grid, mesh_dim_names=("pp", "tp", *STATE_DIMS)))[STATE_DIMS]


def expert_groups(plan: Plan, device_type: str) -> tuple[dist.ProcessGroup, DeviceMesh]:
    """This rank's ep group, and all ranks with dp in two directions: along ep, and along those that hold the same experts."""
    own = plan.mesh
    ranks = torch.arange(plan.world).view(own.pp, own.dp // own.ep, own.ep, own.cp, own.tp)
    group, _ = dist.new_subgroups_by_enumeration(ranks.movedim(2, -1).flatten(0, -2).tolist())
    by_replica = ranks.transpose(1, 2).flatten(2, 3)  # those along cp hold the same experts, and have other tokens
    names = ("pp", "ep", "replicas", "tp")
    _note(group)
    return group, _noted_mesh(DeviceMesh(device_type, by_replica, mesh_dim_names=names))


def link_groups(plan: Plan, mesh: DeviceMesh) -> dict[Link, dist.ProcessGroup]:
    """A group of two ranks for each link of this rank's coordinate.

    With NCCL only these two make it, all in the order of links: a cluster has as many as ranks. gloo finds its peers under the
    group's name, and names that two ranks agree on by themselves come again in a later run of the process: all ranks make all.
    So they do where a default group that is bound to a device is split.
    """
    here, own = mesh.get_local_rank("pp"), dist.get_process_group_ranks(mesh.get_group("pp"))
    alone = "nccl" in dist.get_backend(mesh.get_group("pp")) and not _is_bound_to_device()
    columns = [own] if alone else mesh.mesh.reshape(mesh["pp"].size(), -1).T.tolist()
    found: dict[Link, dist.ProcessGroup] = {}
    for link, column in product(links_of(plan), columns):
        is_mine = here in link and column == own
        if is_mine or not alone:
            group = _pair(column, link, alone)
            found |= {link: group} if is_mine else {}
    return found


def _is_bound_to_device() -> bool:
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def links_of(plan: Plan) -> list[Link]:
    """Between the coordinates of neighbouring stages, each way."""
    homes = [stage.coordinate for stage in plan.stages]
    pairs = {pair for pair in pairwise(homes) if pair[0] != pair[1]}
    return sorted({*pairs, *((target, source) for source, target in pairs)})


def _pair(ranks: list[int], link: Link, alone: bool) -> Any:
    source, target = link
    pair = sorted((ranks[source], ranks[target]))
    group = dist.new_group(pair, use_local_synchronization=alone, group_desc=f"pp {source} to {target}")
    _note(group)
    return group


def tied_group(places: tuple[int, ...], mesh: DeviceMesh) -> dist.ProcessGroup:
    """Of the ranks beside this one at these pp coordinates; every rank makes all such groups."""
    if len(places) == mesh["pp"].size():
        return mesh.get_group("pp")
    columns = mesh.mesh.reshape(mesh["pp"].size(), -1).T.tolist()
    own, _ = dist.new_subgroups_by_enumeration([[column[place] for place in places] for column in columns])
    _note(own)
    return own if own is not None else mesh.get_group("pp")
