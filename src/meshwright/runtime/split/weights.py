"""A module's weights cut over tp as the plan says: each becomes this rank's part, an ordinary parameter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.core.errors import PlanError, nearest
from meshwright.core.names import expand_names
from meshwright.core.plan import BlockSharding, Plan, TensorSharding
from meshwright.runtime.places import Place, note_place, places_of
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Cut, Layout

AXIS: Axis = "tp"


def cut_weights(module: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """Tied parameters stay tied: a tensor is cut once, under all its names."""
    done: dict[int, tuple[nn.Parameter, Cut]] = {}
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, sharding in sharded_tensors(module, plan):
        cut = Cut(sharding.dims.index(AXIS), sharding.runs)
        holder, own_name = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        whole = holder.get_parameter(own_name)
        if id(whole) not in done:
            check_divides(name, whole, cut, ranks.size)
            part = nn.Parameter(part_of(whole.detach(), ranks, cut), requires_grad=whole.requires_grad)
            done[id(whole)] = part, cut
            note_place(module, first_names[id(whole)], Place(AXIS, cut.dim, cut.runs))
        part, cut_before = done[id(whole)]
        if cut_before != cut:
            raise PlanError(f"'{name}' is tied to a tensor that is cut otherwise: shard both the same way")
    _replace(module, {key: part for key, (part, _) in done.items()})


def _replace(module: nn.Module, parts: dict[int, nn.Parameter]) -> None:
    for holder in module.modules():
        for name, parameter in holder._parameters.items():
            if parameter is not None and id(parameter) in parts:
                holder._parameters[name] = parts[id(parameter)]


def part_of(whole: Tensor, ranks: Ranks, cut: Cut) -> Tensor:
    """A copy: the whole tensor can be given back."""
    return ranks.own_part(whole, cut).clone(memory_format=torch.contiguous_format)


def check_divides(name: str, whole: Tensor, cut: Cut, degree: int) -> None:
    size = whole.shape[cut.dim] // cut.runs
    if size % degree:
        legal = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 64)
        raise PlanError(
            f"dim {cut.dim} of '{name}' has size {size}, which tp={degree} does not divide: use one of {legal}"
        )


def sharded_tensors(module: nn.Module, plan: Plan) -> Iterator[tuple[str, TensorSharding]]:
    """Full name of every parameter the plan shards over tp, with how."""
    for block, rule in rules_by_block(module, plan).items():
        own = dict(module.get_submodule(block).named_parameters(remove_duplicate=False))
        for tensor in rule.tensors:
            if AXIS not in tensor.dims:
                continue
            if tensor.tensor not in own:
                raise PlanError(
                    f"the plan shards '{tensor.tensor}' of block '{block}', which has no such parameter: "
                    f"{nearest(tensor.tensor, own)}"
                )
            if len(tensor.dims) != own[tensor.tensor].dim():
                raise PlanError(
                    f"sharding of '{block}.{tensor.tensor}' has {len(tensor.dims)} dims, but its shape is "
                    f"{list(own[tensor.tensor].shape)}: give one entry a dim, empty where it is whole"
                )
            yield f"{block}.{tensor.tensor}", tensor


def rules_by_block(module: nn.Module, plan: Plan) -> dict[str, BlockSharding]:
    """A kind is named after the class of its blocks; a rule for a block goes before one for its kind."""
    found: dict[str, BlockSharding] = {}
    for rule in plan.sharding:
        if rule.for_kind is None:
            continue
        blocks = [name for name in plan.blocks if rule.for_kind in (type(module.get_submodule(name)).__name__, name)]
        if not blocks:
            raise PlanError(f"sharding is for kind '{rule.for_kind}', but no block of the model is a {rule.for_kind}")
        found.update(dict.fromkeys(blocks, rule))
    for rule in plan.sharding:
        found.update(dict.fromkeys(expand_names(rule.for_blocks), rule))
    return found


def layouts_of_parameters(module: nn.Module) -> dict[str, Layout]:
    """What the Splitter is to know of each cut parameter."""
    return {
        name: {place.axis: Cut(place.dim, place.runs) for place in places if place.axis == AXIS}
        for name, places in places_of(module).items()
    }
