"""A plan laid on the same architecture with fewer blocks, to be compared with one process in seconds.

Every block of the small model stands for one of the plan's: a block that is there once for itself, the blocks of a list
(`blocks.0`, `blocks.1`, …) for some of that list, of their own kind. It takes that block's sharding, recompute and stage.

    over the stages    each that holds blocks of the list gets one, and more where it holds more               -> _spread
    within a stage     first the blocks that the plan treats as none before them                               -> _stand_ins

A plan of which some stage or some treatment would be left out is refused: what was not run was not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from meshwright.core.errors import PlanError
from meshwright.core.graph import Block, Graph
from meshwright.core.names import compact_names, expand_names, is_list_item
from meshwright.core.plan import BlockSharding, Plan, Recompute, RecomputeMode, Stage, TensorSharding


@dataclass(frozen=True)
class _Treatment:
    """The sharding and recompute of one block in a plan."""

    tensors: tuple[TensorSharding, ...]
    recompute: RecomputeMode | None


@dataclass(frozen=True)
class _Planned:
    """A block of the plan's own model; or one of the small model, with what it takes over."""

    name: str
    kind: str
    stage: int
    treatment: _Treatment


def shrunk_plan(plan: Plan, whole: Graph, small: Graph) -> Plan:
    """whole: the graph of the plan's own model. The plan is for the small model then, as its graph says."""
    planned = _planned(plan, whole)
    lists = _by_list(block for block in small.blocks if block.name)
    stand_ins = {one.name: one for name, blocks in lists.items() for one in _of_list(name, blocks, planned)}
    in_order = [stand_ins[block.name] for block in small.blocks if block.name]
    return msgspec.structs.replace(
        plan,
        model=small.model,
        graph=small.identity,
        stages=_stages(plan, in_order),
        sharding=_sharding(in_order),
        recompute=_recompute(in_order),
    )


def _planned(plan: Plan, whole: Graph) -> dict[str, list[_Planned]]:
    """The plan's blocks by the list they are in."""
    kinds = {block.name: block.kind for block in whole.blocks}
    stages = {name: number for number, stage in enumerate(plan.stages) for name in expand_names(stage.blocks)}
    of_kind = {rule.for_kind: rule.tensors for rule in plan.sharding if rule.for_kind is not None}
    of_block = {name: rule.tensors for rule in plan.sharding for name in expand_names(rule.for_blocks)}
    modes: dict[str, RecomputeMode] = {name: rule.mode for rule in plan.recompute for name in expand_names(rule.blocks)}
    found: dict[str, list[_Planned]] = {}
    for name, stage in stages.items():
        tensors = of_block.get(name, of_kind.get(kinds[name], ()))
        block = _Planned(name, kinds[name], stage, _Treatment(tensors, modes.get(name)))
        found.setdefault(_list_of(name), []).append(block)
    return found


def _by_list(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(_list_of(block.name), []).append(block)
    return found


def _list_of(name: str) -> str:
    """`blocks` for `blocks.3`; a block of no list is its own."""
    return name.rpartition(".")[0] if is_list_item(name) else name


def _of_list(name: str, blocks: list[Block], planned: dict[str, list[_Planned]]) -> Iterator[_Planned]:
    if name not in planned:
        raise PlanError(f"the shrunk model has '{name}', which the plan does not name: compare a plan of this model")
    own = planned[name]
    stages = sorted({block.stage for block in own})
    counts = _spread(len(blocks), [sum(block.stage == stage for block in own) for stage in stages])
    laid = iter(blocks)
    itself = {one.name: [one] for one in own} if len(own) == len(blocks) else {}
    seen: set[_Treatment] = set()
    for stage, count in zip(stages, counts, strict=True):
        for _ in range(count):
            block = next(laid)
            stood_for = _stood_for(block, stage, itself.get(block.name) or own, seen)
            seen.add(stood_for.treatment)
            yield _Planned(block.name, block.kind, stage, stood_for.treatment)
    left = next((block for block in own if block.treatment not in seen), None)
    if left is not None:
        raise PlanError(
            f"parity runs a shrunk model with {len(blocks)} of the {len(own)} blocks of '{name}', too few for every way in which "
            f"the plan shards and recomputes them: '{left.name}' would be left out; give the blocks fewer different ways"
        )


def _spread(count: int, sizes: list[int]) -> list[int]:
    """Shares `count` blocks out over stages that hold `sizes` blocks of the whole model: one each, then where most are left out."""
    if count < len(sizes):
        last = max(1, count - 1)
        chosen = {round(number * (len(sizes) - 1) / last) for number in range(count)}
        return [int(place in chosen) for place in range(len(sizes))]
    counts = [1] * len(sizes)
    for _ in range(count - len(sizes)):
        place = max(range(len(sizes)), key=lambda place: sizes[place] / counts[place])
        counts[place] += 1
    return counts


def _stood_for(block: Block, stage: int, own: list[_Planned], seen: set[_Treatment]) -> _Planned:
    """A block of the same kind: of the same stage if there is one, and treated as none before; of several, itself."""
    alike = [one for one in own if one.kind == block.kind]
    if not alike:
        raise PlanError(
            f"the shrunk model has '{block.name}' of kind '{block.kind}', of which the plan's model has none there: give "
            "the degrees as flags instead of the plan"
        )
    return min(alike, key=lambda one: (one.stage != stage, one.treatment in seen, one.name != block.name))


def _stages(plan: Plan, blocks: list[_Planned]) -> tuple[Stage, ...]:
    names = [[block.name for block in blocks if block.stage == number] for number in range(len(plan.stages))]
    if [] in names:
        raise PlanError(
            f"parity runs a shrunk model of {len(blocks)} blocks, too few for the plan's {len(names)} stages: stage "
            f"{names.index([])} would be empty; compare a plan with fewer stages"
        )
    return tuple(
        Stage(coordinate=stage.coordinate, blocks=compact_names(own))
        for stage, own in zip(plan.stages, names, strict=True)
    )


def _sharding(blocks: list[_Planned]) -> tuple[BlockSharding, ...]:
    """One rule a kind and way: tensors of other kinds may have the same names."""
    rules: dict[tuple[str, tuple[TensorSharding, ...]], list[str]] = {}
    for block in blocks:
        rules.setdefault((block.kind, block.treatment.tensors), []).append(block.name)
    return tuple(
        BlockSharding(for_blocks=compact_names(names), tensors=tensors)
        for (_, tensors), names in rules.items()
        if tensors
    )


def _recompute(blocks: list[_Planned]) -> tuple[Recompute, ...]:
    modes: dict[RecomputeMode, list[str]] = {}
    for block in blocks:
        if block.treatment.recompute is not None:
            modes.setdefault(block.treatment.recompute, []).append(block.name)
    return tuple(Recompute(mode=mode, blocks=compact_names(names)) for mode, names in modes.items())
