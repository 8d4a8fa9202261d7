"""`state_dict()` and `load_state_dict()` of a spread module and its optimizer, for people who save by themselves.

A rank holds parts (tp, ep, ZeRO). What `state_dict()` gives says so, as it does under `fully_shard`: parts are DTensors that know
their place in the whole (`addresses.py`), with a note of whose part it is, which survives `torch.save`. A tensor that is cut in
runs has no such form and is put together, for which every rank must ask. `load_state_dict()` takes

    the whole tensor        each rank takes its part of it
    this rank's own part    as `state_dict()` gave it, on this rank or one that holds the same part
    another rank's part, or one that nobody marked       refused: it would be taken for this rank's
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.core.errors import CheckpointError
from meshwright.runtime.addresses import Addresses
from meshwright.runtime.clip import local
from meshwright.runtime.own_loop.parts import MARKED, unmark

NOTE = "_meshwright_part"
ADVICE = (
    "save each rank's own file, or whole tensors: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
    "torch.distributed.checkpoint.state_dict on all ranks"
)


def mark_states(module: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Where parameters are divided, what is saved says how, and what is loaded is looked at."""
    states = States(module, mesh)
    if not states.divided:
        return
    module.register_state_dict_post_hook(partial(states.after_save))  # torch writes a note on the hook
    module.register_load_state_dict_pre_hook(states.before_load)
    optimizer.register_state_dict_post_hook(states.after_optimizer_save)
    optimizer.register_load_state_dict_pre_hook(states.before_optimizer_load)


class States:
    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.addresses = Addresses(module, mesh)
        parameters = self.addresses.parameters
        self.divided = {
            name: parameter
            for name, parameter in parameters.items()
            if name in self.addresses.places or isinstance(parameter, DTensor)
        }
        self.names = {id(parameter): name for name, parameter in reversed(list(parameters.items()))}

    # ------------------------------------------------------------ modules

    def after_save(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in self.divided:
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = self._saved(name, state[f"{prefix}{name}"])

    def before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, own in self.divided.items():
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = self._own(name, own, state[f"{prefix}{name}"], f"'{name}'")

    # ------------------------------------------------------------ optimizers

    def after_optimizer_save(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return self._mapped(optimizer, state, lambda name, found, _: self._saved(name, found))

    def before_optimizer_load(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return self._mapped(optimizer, state, self._own_state)

    def _mapped(
        self, optimizer: Optimizer, state: dict[str, Any], change: Callable[[str, Tensor, str], Tensor]
    ) -> dict[str, Any]:
        """With every tensor that an optimizer keeps for a divided parameter changed; a count of steps is not one."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keys = [
            key for group in state["param_groups"] for key in group["params"]
        ]  # numbers, or names: torch takes both
        entries = dict(state["state"])
        for key, parameter in zip(keys, own, strict=False):
            name, kept = self.names.get(id(parameter), ""), entries.get(key)
            if name in self.divided and isinstance(kept, dict):
                entries[key] = {
                    part: change(name, found, part) if isinstance(found, Tensor) and found.dim() else found
                    for part, found in kept.items()
                }
        return {**state, "state": entries}

    def _own_state(self, name: str, found: Tensor, key: str) -> Tensor:
        own: Tensor = self._own(name, self.divided[name], found, f"'{key}' of '{name}'")
        return own

    # ------------------------------------------------------------ one tensor

    def _saved(self, name: str, found: Tensor) -> Tensor:
        if isinstance(found, MARKED):
            found = found.detach()  # with keep_vars torch gives the parameter itself
            unmark(found)
        saved: Tensor = self.addresses.addressed(name, found)
        if isinstance(saved, DTensor):
            vars(saved)[NOTE] = self._here(name, self.divided[name])
        return saved

    def _own(self, name: str, own: Tensor, found: Any, words: str) -> Any:
        if not isinstance(found, Tensor):
            return found
        if isinstance(found, DTensor):
            return self._own_part(name, own, found, words)
        if tuple(found.shape) == self._whole_shape(name, own):
            return _like(own, self.addresses.own_part(name, found.to(own.device)))
        if found.shape == local(own).shape:
            raise CheckpointError(
                f"{words} has the shape {list(found.shape)} of one rank's part, and nothing says which rank's; the whole has "
                f"{list(self._whole_shape(name, own))}: {ADVICE}"
            )
        return found  # torch names both shapes

    def _own_part(self, name: str, own: Tensor, found: DTensor, words: str) -> Tensor:
        whose, here = vars(found).get(NOTE), self._here(name, own)
        if (whose is not None and tuple(whose) != here) or local(found).shape != local(own).shape:
            raise CheckpointError(
                f"{words} is the part of the rank at {list(whose or ())} along its axes, of shape {list(local(found).shape)}; "
                f"this rank is at {list(here)} and holds {list(local(own).shape)}: {ADVICE}"
            )
        return _like(own, local(found))

    def _here(self, name: str, own: Tensor) -> tuple[int, ...]:
        """Where this rank is along the directions that divide a tensor, the cuts first."""
        cuts = [self.addresses.groups[place.axis].rank() for place in self.addresses.places.get(name, ())]
        return (*cuts, *((own.device_mesh.get_coordinate() or ()) if isinstance(own, DTensor) else ()))

    def _whole_shape(self, name: str, own: Tensor) -> tuple[int, ...]:
        shape = list(own.shape)
        for place in self.addresses.places.get(name, ()):
            shape[place.dim] *= self.addresses.groups[place.axis].size()
        return tuple(shape)


def _like(own: Tensor, part: Tensor) -> Tensor:
    if not isinstance(own, DTensor):
        return part
    return DTensor.from_local(
        part.contiguous(), own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
