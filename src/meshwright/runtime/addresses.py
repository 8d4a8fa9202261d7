"""Parts of tensors, with the place they have in the whole: what a checkpoint needs to be read under another plan than wrote it.

A tensor of a spread module is what is left of it here after its cuts (`places.py`: tp, ep), under ZeRO a shard of that. Seen
from outside it is one tensor over several directions of ranks: those that cut it, the first made first, then those that shard
the rest:

    W[D, F_tp] under ZeRO    →  over (tp, dp)         (Shard(1), Shard(0))
    experts [E_ep, …]        →  over (ep, replicas)   (Shard(0), Shard(0))

Directions along which ranks hold the same are left out: each writes the same part, and one of them is kept. A dim that is
several runs in a row has no such form, since a rank's part of it is not in one piece: such a tensor is put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from meshwright.runtime.clip import local
from meshwright.runtime.gather import put_together
from meshwright.runtime.mesh import axis_groups
from meshwright.runtime.places import Place, Places, places_of
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Cut


class Addresses:
    """Of the parameters of one module, and of what an optimizer keeps for each."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.device_type = mesh.device_type
        self.groups = axis_groups(module, mesh)
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.places = _places_of_all_names(module)
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}

    def addressed(self, name: str, found: Any) -> Any:
        """A parameter's tensor, or a nest of tensors that an optimizer keeps for it, as it is saved. The memory is the same,
        but for tensors that are put together; all ranks ask for the same ones, in one order."""
        if isinstance(found, Mapping):
            return {key: self.addressed(name, each) for key, each in found.items()}
        if not self._is_part(name, found):
            return found
        places = self.places[name]
        return put_together(found, places, self.groups) if _in_pieces(places) else self._as_part(found, places)

    def fill(self, name: str, own: Any, loaded: Any) -> Any:
        """The other way: what was loaded into an addressed tensor, in this rank's own; and what is no tensor, as loaded."""
        if isinstance(own, Mapping):
            return {key: self.fill(name, each, loaded[key]) for key, each in own.items()}
        if not isinstance(own, Tensor):
            return loaded
        if self._is_part(name, own) and _in_pieces(self.places[name]):
            loaded = self._own_part(own, loaded, self.places[name])
        if local(own).data_ptr() != local(loaded).data_ptr():
            local(own).detach().copy_(local(loaded))
        return own

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of a whole tensor, as an ordinary one."""
        return self._own_part(self.parameters[name], whole, self.places.get(name, ()))

    def _is_part(self, name: str, found: Any) -> bool:
        """Not a count of steps, nor a tensor that no axis cuts."""
        return bool(self.places.get(name)) and isinstance(found, Tensor) and found.shape == self.parameters[name].shape

    def _as_part(self, found: Tensor, places: tuple[Place, ...]) -> DTensor:
        groups = [self.groups[place.axis] for place in places]
        placements: list[Placement] = [Shard(place.dim) for place in places]
        shape, ranks = list(found.shape), torch.tensor(dist.get_rank())
        for place, group in zip(places, groups, strict=True):
            shape[place.dim] *= group.size()
        if isinstance(found, DTensor):
            groups += [found.device_mesh.get_group(dim) for dim in range(found.device_mesh.ndim)]
            placements += found.placements
            ranks = found.device_mesh.mesh
        whole = torch.empty(shape, device="meta")
        mesh = self._mesh(len(places), groups, ranks)
        return DTensor.from_local(
            local(found).detach(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _mesh(self, num_cuts: int, groups: list[dist.ProcessGroup], ranks: Tensor) -> DeviceMesh:
        """The ranks that shard, once for every rank along the axes that cut."""
        key = tuple(id(group) for group in groups)
        if key not in self._meshes:
            for group in reversed(groups[:num_cuts]):
                along = dist.get_process_group_ranks(group)
                ranks = torch.stack([ranks - dist.get_rank() + rank for rank in along])
            names = tuple(f"direction{number}" for number in range(len(groups)))
            self._meshes[key] = DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=names)
        return self._meshes[key]

    def _own_part(self, own: Tensor, whole: Tensor, places: tuple[Place, ...]) -> Tensor:
        part = whole
        for place in places:
            group = self.groups[place.axis]
            part = Ranks(place.axis, group.size(), group.rank(), group).own_part(part, Cut(place.dim, place.runs))
        if not isinstance(own, DTensor):
            return part
        shards = own.device_mesh.get_group(own.device_mesh.ndim - 1)
        size = -(-part.shape[0] // shards.size())
        return part[size * shards.rank() : size * (shards.rank() + 1)]


def _in_pieces(places: tuple[Place, ...]) -> bool:
    return any(place.runs > 1 for place in places)


def _places_of_all_names(module: nn.Module) -> Places:
    """Tied names share their tensor's places, which are noted under the first."""
    noted = places_of(module)
    by_tensor = {id(p): noted[name] for name, p in module.named_parameters() if name in noted}
    named = module.named_parameters(remove_duplicate=False)
    return {name: by_tensor[id(p)] for name, p in named if id(p) in by_tensor}
