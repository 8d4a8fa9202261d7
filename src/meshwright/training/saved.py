"""What a checkpoint holds of a program, the same under every plan.

    model.NAME                      whole parameters and buffers, by every name of the user's module
    optimizer.state.NAME.KEY        what the optimizer keeps for a parameter; of a tied one, under its first name
    optimizer.settings.NAME         the settings of its group: stages have groups of other parameters
    random.RANK                     what each rank draws next
    loss_scale                      under fp16
    delayed.num_steps               under delayed updates: how many there were, which says whether the warm-up is over
    delayed.parameters.NAME         with them: what the next step computes with, one update older than the model

Ranks write what they hold, with its place in the whole (`runtime/addresses.py`): a stage its own parameters, and where several
hold the same one of them writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

from meshwright.core.errors import CheckpointError, shortened
from meshwright.runtime.addresses import Addresses
from meshwright.runtime.offload.optimizer import HostOptimizer
from meshwright.runtime.offload.saved import late_of, load, load_late, masters_of, states_of, zeros_of
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.training.contents import Contents
from meshwright.training.plain_values import is_plain_number, like
from meshwright.training.tensors_file import DTYPES

Nest = dict[str, Any]


class SavedState:
    """A program's state: as it lies on this rank, and as it is saved."""

    def __init__(self, program: Program, rank: Rank) -> None:
        self.program, self.rank = program, rank
        self.addresses = Addresses(program.module, program.mesh)
        model, optimizer = _state_dicts(program)
        self.model: Nest = model
        self.optimizer: Nest = optimizer
        self.first_names = first_names(program)
        self.delayed: Nest = _delayed(program)

    def saved(self) -> Nest:
        """The same memory where that is possible: what is loaded into it still has to be taken over (`take`)."""
        state = {self._first(name): found for name, found in self.optimizer["state"].items()}
        scale = self.program.loss_scale
        return {
            "model": self._addressed(self.model),
            "optimizer": {"state": self._addressed(state), "settings": self._settings()},
            "random": {str(self.rank.number): _random_state(self.rank)},
            **({} if scale is None else {"loss_scale": scale.state_dict()}),
            **({} if not self.delayed else {"delayed": self._addressed_delayed()}),
        }

    def expect(self, contents: Contents) -> None:
        """Room for the state that a checkpoint has of parameters whose first update makes it, on the host."""
        assert self.program.host is not None
        self.delayed = self._room_for_delayed(self.program.host, contents)
        saved = contents.optimizer_state()
        for name, zeros in zeros_of(self.program.host).items():
            first, own = self._first(name), self.optimizer["state"].setdefault(name, {})
            for key, tensor in saved.get(first, {}).items():
                is_whole = tensor.shape and tensor.shape == contents.tensors[f"model.{first}"].shape
                own.setdefault(key, zeros() if is_whole else torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype]))

    def take(self, loaded: Nest) -> None:
        """What was loaded becomes the program's state."""
        model = {name: self.addresses.fill(name, own, loaded["model"][name]) for name, own in self.model.items()}
        kept = loaded["optimizer"]["state"]
        state = {
            name: self.addresses.fill(name, own, kept[self._first(name)])
            for name, own in self.optimizer["state"].items()
        }
        groups = [{**group, **self._loaded_settings(group, loaded)} for group in self.optimizer["param_groups"]]
        if self.program.host is not None:
            load(self.program.host, model, state)
            _set_groups(self.program, groups)
            self._take_delayed(self.program.host, loaded)
        else:
            set_state_dict(
                self.program.spread_module,
                self.program.optimizer,
                model_state_dict=model,
                optim_state_dict={"state": state, "param_groups": groups},
            )
        self.program.take_over_loaded()
        if self.program.loss_scale is not None:
            self.program.loss_scale.load_state_dict(loaded["loss_scale"])  # the first scale, where none was saved
        if "random" in loaded:
            _set_random_state(loaded["random"][str(self.rank.number)], self.rank)

    def _take_delayed(self, host: HostOptimizer, loaded: Nest) -> None:
        """Of a checkpoint that has none, the warm-up begins anew."""
        host.num_steps = int(loaded["delayed"]["num_steps"]) if "delayed" in loaded else 0
        late = self.delayed.get("parameters")
        if late is not None:
            found = loaded["delayed"]["parameters"]
            filled = {name: self.addresses.fill(name, own, found[self._first(name)]) for name, own in late.items()}
            load_late(host, filled, host.num_steps)

    def _room_for_delayed(self, host: HostOptimizer, contents: Contents) -> Nest:
        """For what the checkpoint has of late updates; memory of its own, since parameters take their newest values first."""
        if not self.delayed or "delayed.num_steps" not in contents.tensors:
            return {}
        late = {
            name: torch.empty_like(found)
            for name, found in late_of(host).items()
            if f"delayed.parameters.{self._first(name)}" in contents.tensors
        }
        return {"num_steps": torch.tensor(0), **({"parameters": late} if late else {})}

    def _addressed_delayed(self) -> Nest:
        late = {self._first(name): found for name, found in self.delayed.get("parameters", {}).items()}
        return {"num_steps": self.delayed["num_steps"], **({"parameters": self._addressed(late)} if late else {})}

    def _first(self, name: str) -> str:
        return self.first_names.get(name, name)

    def _addressed(self, tensors: Mapping[str, Any]) -> Nest:
        return {name: self.addresses.addressed(name, found) for name, found in tensors.items()}

    def _settings(self) -> Nest:
        """A tuple is one entry of the file; a mapping would be one for every setting."""
        return {
            self._first(name): tuple((key, value) for key, value in group.items() if key != "params")
            for group in self.optimizer["param_groups"]
            for name in group["params"]
        }

    def _loaded_settings(self, group: Nest, loaded: Nest) -> Nest:
        names = [self._first(name) for name in group["params"]]
        found = settings_of(names[0], loaded["optimizer"]["settings"][names[0]], group) if names else {}
        return {key: like(group.get(key), value) for key, value in found.items()}


def settings_of(name: str, loaded: object, own: Nest) -> Nest:
    """The settings of a parameter's group, as pairs. One that the optimizer has must be of the kind that it has."""
    if not isinstance(loaded, list | tuple):
        raise CheckpointError(f"the checkpoint has no settings of the optimizer for '{name}'")
    for pair in loaded:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise CheckpointError(
                f"the checkpoint has {shortened(repr(pair))} among the optimizer's settings for '{name}'"
            )
        if not _suits(own.get(pair[0]), pair[1]):
            raise CheckpointError(
                f"the checkpoint has {shortened(f'{pair[0]}={pair[1]!r}')} for '{name}', where the optimizer has {own[pair[0]]!r}"
            )
    return dict(loaded)


def _suits(own: object, loaded: object) -> bool:
    """Whether a value can take another's place: a number for a number, as many for as many, and anything for None."""
    if own is None or (isinstance(own, bool) and loaded is None):
        return True
    if isinstance(own, bool):
        return isinstance(loaded, bool)
    if isinstance(own, int | float | Tensor):
        return is_plain_number(loaded)
    if isinstance(own, list | tuple):
        return isinstance(loaded, list | tuple) and len(own) == len(loaded) and all(map(_suits, own, loaded))
    return isinstance(loaded, type(own))


def _state_dicts(program: Program) -> tuple[Nest, Nest]:
    """Of the module and its optimizer, by the module's names; of state on the host, from there."""
    host = program.host
    if host is None:
        model, optimizer = get_state_dict(program.spread_module, program.optimizer)
        return model, optimizer
    host.rest()
    masters = masters_of(host)
    named = dict(program.module.named_parameters(remove_duplicate=False))
    model = get_model_state_dict(program.spread_module)
    model = {name: masters.get(id(named.get(name)), found) for name, found in model.items()}
    return model, {"state": states_of(host), "param_groups": _named_groups(program)}


def _delayed(program: Program) -> Nest:
    """Of updates that may be late; empty under a plan without them."""
    host = program.host
    if host is None or not program.plan.offload.delayed:
        return {}
    return {"num_steps": torch.tensor(host.num_steps), **({"parameters": late_of(host)} if host.is_owing else {})}


def _named_groups(program: Program) -> list[Nest]:
    names = {id(parameter): name for name, parameter in program.module.named_parameters()}
    return [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in program.optimizer.param_groups
    ]


def _set_groups(program: Program, groups: list[Nest]) -> None:
    for own, loaded in zip(program.optimizer.param_groups, groups, strict=True):
        own.update({key: value for key, value in loaded.items() if key != "params"})


def first_names(program: Program) -> dict[str, str]:
    """Names of copies that stages have of tied parameters → the name by which a module in one piece knows them."""
    ties = program.pipeline.tied.ties if program.pipeline is not None else ()
    return {name: tie.first_name for tie in ties for name in tie.names.values()}


def _random_state(rank: Rank) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    return found | {"cuda": torch.cuda.get_rng_state(rank.device)} if rank.device.type == "cuda" else found


def _set_random_state(state: dict[str, Tensor], rank: Rank) -> None:
    torch.set_rng_state(state["cpu"])
    if rank.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], rank.device)
