"""Which collectives one rank calls inside the blocks and between the stages. Those of the state: cost/step_calls.py.

In each microbatch, and again where the forward is redone:

    tp       all-reduce where labels say so (core/labels.py)                              -> _tensor_calls
    sp       sequence parallel: instead, an all-gather before and a reduce-scatter after each split part
    loss     logits split by the vocabulary: three all-reduces over tp, of each token's largest logit, its sum of
             exponentials and its target's logit                                          -> _loss_calls
    cp       all-gather of keys and values before attention; backward gathers them again and reduce-scatters their gradients
    ep       all-to-all of the tokens to their experts and back, forward and backward     -> _expert_calls
    pp       a send of each tensor that crosses to the next stage, and of its gradient back   -> transfer_calls

Under sequence parallel a split part keeps its rank's tokens of what it read, not what it gathered: memory counts 1/tp of
every tensor with tokens (cost/division.py). Backward therefore gathers what the columns read once more, beside the gradient
of what the rows made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Literal

from meshwright.core.collective import Axis, Collective, CollectiveKind, total
from meshwright.core.graph import PRECISION_BYTES, Op, Phase, Shape
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.division import Division
from meshwright.cost.links import Group, axis_group
from meshwright.cost.passes import StagePasses, handed_on_bytes, sent_sizes

LOSS_CALLS, LOSS_ITEM_BYTES = 3, 4
"""Largest logit, sum and target of each token, in fp32."""

ALONE = Group(1)
When = Literal["forward", "backward", "other", "update"]


@dataclass(frozen=True)
class Call:
    """One collective of a step: when it runs, and how often."""

    kind: CollectiveKind
    num_bytes: int
    count: int
    phase: When
    axis: Axis = "dp"
    group: Group = ALONE
    block: str = ""
    """The group of parameters it moves, or the block it runs in."""


def as_collectives(found: Iterable[Call]) -> tuple[Collective, ...]:
    return total(
        Collective(kind=call.kind, axis=call.axis, count=call.count, total_bytes=call.count * call.num_bytes)
        for call in found
    )


def times(calls: Iterable[Call], count: int) -> tuple[Call, ...]:
    return tuple(replace(call, count=call.count * count) for call in calls)


# ---------------------------------------------------------------- inside the blocks


def block_calls(
    division: Division, plan: Plan, phase: Phase, passes: Collection[int] | None = None
) -> tuple[Call, ...]:
    """The collectives of one microbatch through one block, forward or backward; `count` is per microbatch.

    passes: numbers of the block's forward passes that count, where a stage has not all of them; backward follows.
    """
    own = _Ops(division, plan, passes)
    found = [*_tensor_calls(own, phase), *_loss_calls(own, phase), *_context_calls(own, phase)]
    return (*found, *_expert_calls(own, phase))


class _Ops:
    """The forward ops of a block that a stage runs."""

    def __init__(self, division: Division, plan: Plan, passes: Collection[int] | None) -> None:
        self.division, self.plan = division, plan
        every = division.kind.passes
        self.numbers: Collection[int] = range(len(division.kind.ops))
        if passes is not None:
            self.numbers = frozenset(n for number in passes for n in every[number].op_range)

    def __iter__(self) -> Iterator[tuple[int, Op]]:
        ops = self.division.kind.ops
        return ((n, op) for n, op in enumerate(ops) if op.phase == "forward" and n in self.numbers)

    def of(self, wanted: tuple[int, ...]) -> list[Op]:
        return [self.division.kind.ops[number] for number in wanted if number in self.numbers]


def _tensor_calls(own: _Ops, phase: Phase) -> Iterator[Call]:
    plan, labels = own.plan, own.division.labels
    if plan.mesh.tp == 1:
        return
    made = [_result_bytes(op, plan) for op in own.of(labels.reduced_forward)]
    read = [_read_bytes(op, plan) for op in own.of(labels.reduced_backward)]
    group = axis_group(plan.mesh, "tp")
    reduced = made if phase == "forward" else read
    if not plan.sequence_parallel:
        yield from (Call("all_reduce", size, 1, phase, "tp", group) for size in reduced)
        return
    gathered = read if phase == "forward" else [*read, *made]
    yield from (Call("all_gather", size // plan.mesh.tp, 1, phase, "tp", group) for size in gathered)
    yield from (Call("reduce_scatter", size, 1, phase, "tp", group) for size in reduced)


def _loss_calls(own: _Ops, phase: Phase) -> Iterator[Call]:
    """A softmax over what lies split over tp; attention's is over the tokens, and its heads are what is split."""
    if own.plan.mesh.tp == 1 or phase == "backward":
        return
    for _, op in own:
        if "softmax" in op.name and op.region != "attention" and own.division.labels.of(op.inputs[0]) == "split":
            size = _elements(op.result_shape[:-1], own.plan) * LOSS_ITEM_BYTES
            yield Call("all_reduce", round(size), LOSS_CALLS, phase, "tp", axis_group(own.plan.mesh, "tp"))


def _result_bytes(op: Op, plan: Plan) -> int:
    return round(op.written_bytes.at(plan.microbatch) / plan.mesh.cp)


def _read_bytes(op: Op, plan: Plan) -> int:
    """Of the activation a weight is applied to: the input that has tokens."""
    shapes = [shape for shape in op.input_shapes if any(dim.per_sample for dim in shape)]
    return round(_elements(shapes[0], plan) * PRECISION_BYTES[op.dtype]) if shapes else 0


def _elements(shape: Shape, plan: Plan) -> float:
    """Of an activation, on one of the cp ranks."""
    return prod(dim.at(plan.microbatch) for dim in shape) / plan.mesh.cp


def _context_calls(own: _Ops, phase: Phase) -> Iterator[Call]:
    plan = own.plan
    if plan.mesh.cp == 1:
        return
    group = axis_group(plan.mesh, "cp")
    for number, op in own:
        if op.kind == "attention":
            both = sum(_elements(shape, plan) for shape in op.input_shapes[1:3])
            local = both * PRECISION_BYTES[op.dtype] / own.division.tp_degree(number)
            yield Call("all_gather", round(local), 1, phase, "cp", group)
            if phase == "backward":
                yield Call("reduce_scatter", round(local * plan.mesh.cp), 1, phase, "cp", group)


def _expert_calls(own: _Ops, phase: Phase) -> Iterator[Call]:
    """Tokens to their experts and back: as many bytes as the experts' first matmuls read."""
    if own.plan.mesh.ep == 1:
        return
    size = _expert_input_bytes(own)
    if size:
        yield Call("all_to_all", size, 2, phase, "ep", axis_group(own.plan.mesh, "ep"))


def _expert_input_bytes(own: _Ops) -> int:
    """What enters the experts of a block: results from outside them that their matmuls read, each once."""
    ops = own.division.kind.ops
    found: dict[object, int] = {}
    for _, op in own:
        if op.region != "expert" or op.kind != "matmul":
            continue
        for source in op.inputs:
            if isinstance(source, int) and ops[source].kind != "matmul" and not _after_matmul(ops, source):
                found[source] = _read_bytes(op, own.plan)
    return sum(found.values())


def _after_matmul(ops: tuple[Op, ...], number: int) -> bool:
    """Whether a result inside the experts came of one of their matmuls."""
    op = ops[number]
    if op.region != "expert":
        return False
    if op.kind == "matmul":
        return True
    return any(_after_matmul(ops, source) for source in op.inputs if isinstance(source, int))


# ---------------------------------------------------------------- between the stages


def sends_shares(plan: Plan, recipe: Recipe) -> bool:
    """Whether each tp rank sends its share of a whole activation, which the next stage's ranks put together again."""
    return plan.mesh.tp > 1 and not (recipe.whole_transfers or plan.sequence_parallel)


def sent_bytes(passes: StagePasses, plan: Plan, divisions: dict[str, Division], recipe: Recipe) -> float:
    """Of the tensors that one rank of a stage sends to the next; their gradients come back as large."""
    size = handed_on_bytes(passes, divisions, plan.microbatch)
    return size / plan.mesh.tp if sends_shares(plan, recipe) else size


def transfer_calls(
    plan: Plan, passes: tuple[StagePasses, ...], divisions: dict[str, Division], recipe: Recipe, coordinate: int
) -> tuple[Call, ...]:
    """The sends of a rank on this coordinate in one step, and the gathers of what arrived in shares."""
    found: list[Call] = []
    for giver, taker in pairwise(range(len(plan.stages))):
        homes = plan.stages[giver].coordinate, plan.stages[taker].coordinate
        if coordinate not in homes or homes[0] == homes[1]:
            continue
        phases: tuple[Phase, Phase] = ("forward", "backward")
        goes, comes = phases if coordinate == homes[0] else phases[::-1]
        share = plan.mesh.tp if sends_shares(plan, recipe) else 1
        for size, needs_gradient in sent_sizes(passes[giver], divisions, plan.microbatch):
            if goes == "forward" or needs_gradient:
                found.append(_send(plan, round(size / share), goes))
            if share > 1 and (comes == "forward" or needs_gradient):
                group = axis_group(plan.mesh, "tp")
                found.append(Call("all_gather", round(size / share), plan.num_microbatches, comes, "tp", group))
    return tuple(found)


def _send(plan: Plan, size: int, phase: Phase) -> Call:
    return Call("send", size, plan.num_microbatches, phase, "pp", axis_group(plan.mesh, "pp"))
