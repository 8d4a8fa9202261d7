"""Cutting a module: a rank keeps the parameters and buffers of its own stages only.

Modules stay where they are, so that the user's forward runs as it is written. A tensor of another stage is replaced by one
without memory that is no longer among the module's parameters: whoever spreads, updates, clips or saves the module meets only
what the rank holds. A parameter in no block belongs to the first stage. A tensor with names on several stages (tied embedding
and head) is copied: each of these stages has one, and they are kept the same (`tied.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from meshwright.core.errors import PlanError
from meshwright.core.names import expand_names
from meshwright.core.plan import Plan
from meshwright.models.sketch import Sketch
from meshwright.runtime.places import places_of


@dataclass(frozen=True)
class StageParameters:
    """The parameters of one stage by name; `blocks`: its blocks, without those of no parameter."""

    number: int
    blocks: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Tie:
    """A tensor with a copy on several stages."""

    names: dict[int, str]
    """Stage → the first name it has there."""
    first_name: str
    """Of all its names in the whole module."""
    trainable: bool


@dataclass(frozen=True)
class Cut:
    stages: tuple[StageParameters, ...]
    """All of the plan."""
    ties: tuple[Tie, ...]


def stage_of_blocks(plan: Plan) -> dict[str, int]:
    return {name: number for number, stage in enumerate(plan.stages) for name in expand_names(stage.blocks)}


def cut(module: nn.Module, plan: Plan, sketch: Sketch, coordinate: int) -> Cut:
    """Drop what other coordinates hold, and untie what several stages hold."""
    stage_of = stage_of_blocks(plan)
    homes = {name: stage_of.get(_block_of(name, stage_of), 0) for name, _ in _named(module)}
    _check_all_train(module, plan, homes)
    ties = tuple(_ties(module, homes))
    found = _by_stage(module, plan, homes)
    _untie(module, homes)
    for name, tensor in list(_named_tensors(module)):
        owner = stage_of.get(_block_of(name, stage_of), 0 if isinstance(tensor, nn.Parameter) else None)
        if owner is not None and plan.stages[owner].coordinate != coordinate:
            _replace(module, name, sketch.parameter(name))
    return Cut(found, ties)


def _check_all_train(module: nn.Module, plan: Plan, homes: dict[str, int]) -> None:
    """All ranks ask of all coordinates, and answer alike."""
    training = {plan.stages[homes[name]].coordinate for name, parameter in _named(module) if parameter.requires_grad}
    for stage in plan.stages:
        if stage.coordinate not in training:
            raise PlanError(
                f"the stages of pp coordinate {stage.coordinate} (blocks {', '.join(stage.blocks)}) hold no parameter that is "
                "trained, so that their ranks would have nothing to update: give the stages in a plan file so that each coordinate "
                "has one, or set pp to 1"
            )


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Of a tensor that several modules have, all names."""
    return [(name, tensor) for name, tensor in _named_tensors(module) if isinstance(tensor, nn.Parameter)]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module that goes by several names (one layer twice in a list) counts by its first, as a block does."""
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def _block_of(name: str, stage_of: dict[str, int]) -> str:
    parts = name.split(".")
    return next((path for end in range(len(parts)) if (path := ".".join(parts[:end])) in stage_of), "")


def _ties(module: nn.Module, homes: dict[str, int]) -> Iterator[Tie]:
    names: dict[int, dict[int, str]] = {}
    for name, parameter in _named(module):
        names.setdefault(id(parameter), {}).setdefault(homes[name], name)
    for first_name, parameter in module.named_parameters():
        if len(names[id(parameter)]) > 1:
            yield Tie(dict(sorted(names[id(parameter)].items())), first_name, parameter.requires_grad)


def _by_stage(module: nn.Module, plan: Plan, homes: dict[str, int]) -> tuple[StageParameters, ...]:
    seen: list[dict[int, str]] = [{} for _ in plan.stages]
    for name, parameter in _named(module):
        seen[homes[name]].setdefault(id(parameter), name)
    return tuple(
        StageParameters(number, expand_names(stage.blocks), tuple(seen[number].values()))
        for number, stage in enumerate(plan.stages)
    )


def _untie(module: nn.Module, homes: dict[str, int]) -> None:
    """Names of one tensor on one stage keep sharing it; on each later stage it becomes a tensor of its own, cut as it was."""
    copies: dict[tuple[int, int], nn.Parameter] = {}
    first: dict[int, int] = {}
    noted = places_of(module)
    places = {id(parameter): noted[name] for name, parameter in module.named_parameters() if name in noted}
    for name, parameter in _named(module):
        home = homes[name]
        if first.setdefault(id(parameter), home) == home:
            continue
        key = (id(parameter), home)
        if key not in copies:
            copies[key] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            if id(parameter) in places:
                noted[name] = places[id(parameter)]
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = copies[key]


def _replace(module: nn.Module, name: str, stand_in: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    part = module.get_submodule(path)
    part._parameters.pop(leaf, None)
    part._buffers.pop(leaf, None)
    vars(part)[leaf] = stand_in
