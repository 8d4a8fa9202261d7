"""The collectives that one rank calls inside the blocks, in each microbatch, and again where the forward is recomputed.

    tp       all-reduce where labels say so (rules/labels.py)                              -> _tensor_calls
    sp       sequence parallel: instead, an all-gather before and a reduce-scatter after each split part
    loss     logits split by the vocabulary: three all-reduces over tp, of each token's largest logit, its sum of
             exponentials and its target's logit; tokens split: one all-reduce of the sum, and along cp one of its
             gradient                                                                     -> _loss_calls
    lookups  of what is no token of the batch (positions): the ranks do them whole, and under sequence parallel take
             their tokens of it; backward gathers the gradient over tp                    -> _lookup_calls
    tokens   what is summed over tokens that lie over ranks, or runs along them           (cost/communication/token_calls.py)
    cp       heads: all-to-all of query, key, value and result, from tokens to heads and back, and backward the same; heads
             of keys that are too few for the ranks go several times (rules/context.py)   -> _exchange_calls
             blocks that cut tokens nobody looks up: the last of a run gathers them, backward by a reduce-scatter
                                                                                          -> _gathered_output_calls
             ring: keys and values go round in one message, cp - 1 sends; backward once more, and with them the sums of
             their gradients, cp sends. Explicit attention gathers keys and values, and scatters their gradients
                                                                                          -> _ring_calls
    ep       all-to-all of the tokens to their experts and back, forward and backward; before them, of how many come to
             each expert                                                                  -> _expert_calls

Rows of experts: a rank sends k rows a token, and sends back as many as came, which depends on the routing. Predicted is an even
spread: exact for what is sent out and for the sum over the ep ranks, as long as no choice is dropped; dropped ones are not
sent.

Under sequence parallel a split part keeps its rank's tokens of what it read, not what it gathered: memory counts 1/tp of
every tensor with tokens (cost/local_block.py). Backward therefore gathers the input of the column-split weights once more, in
addition to the gradient of the output of the row-split weights; a recomputed block does not, since its second forward has just
gathered that input.

A recompute goes as far as backward needs it: sums after the last tensor that backward needs are not made again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.core.graph import PRECISION_BYTES, Kind, Op, Phase, Shape
from meshwright.core.plan import Plan
from meshwright.cost.communication.block_ops import BlockOps
from meshwright.cost.communication.links import Call
from meshwright.cost.communication.token_calls import token_calls
from meshwright.cost.compute.recomputed_ops import last_needed
from meshwright.cost.local_block import LocalBlock
from meshwright.rules.context import ACCUMULATED_BYTES
from meshwright.rules.kinds import cached_in_value

EXPERT_COUNT_BYTES = 8
"""How many rows come to one expert, as int64."""
LOSS_CALLS, LOSS_ITEM_BYTES = 3, 4
"""Largest logit, sum and target of each token, in fp32."""
KEY_AND_VALUE = (1, 2)
"""The positions of keys and values among the inputs of an attention."""


def block_calls(
    local_block: LocalBlock,
    plan: Plan,
    phase: Phase,
    passes: Collection[int] | None = None,
    *,
    recomputed: bool = False,
    again: bool = False,
) -> tuple[Call, ...]:
    """The collectives of one microbatch through one block, forward or backward; `count` is per microbatch.

    passes: numbers of the block's forward passes that are on the stage, where it has not all of them; backward follows.
    recomputed: whether the block is recomputed in backward; again: whether this is the second forward, inside backward.
    """
    own = BlockOps(local_block, plan, phase, passes, last_needed(local_block.kind) if again else None)
    found = [*_tensor_calls(own, recomputed), *_loss_calls(own), *_lookup_calls(own), *token_calls(own)]
    if own.cp > 1:
        found += _exchange_calls(own) if plan.context == "heads" else _ring_calls(own)
    return (*found, *(() if again else _gathered_output_calls(own)), *_expert_calls(own))


# ---------------------------------------------------------------- tp


def _tensor_calls(own: BlockOps, recomputed: bool) -> Iterator[Call]:
    plan, labels = own.plan, own.local_block.labels
    if plan.mesh.tp == 1:
        return
    made = [_result_bytes(op, own) for op in own.of(tuple(filter(own.is_made, labels.reduced_forward)))]
    applied = [(op.activation_shape, PRECISION_BYTES[op.dtype]) for op in own.of(labels.reduced_backward)]
    read = [round(own.elements(shape) * item) if shape else 0 for shape, item in applied]
    reduced = made if own.is_forward else read
    if not plan.sequence_parallel:
        yield from (own.call("all_reduce", size, "tp") for size in reduced)
        return
    gathered = read if own.is_forward else [*([] if recomputed else read), *made]
    yield from (own.call("all_gather", size // plan.mesh.tp, "tp") for size in gathered)
    yield from (own.call("reduce_scatter", size, "tp") for size in reduced)


def _loss_calls(own: BlockOps) -> Iterator[Call]:
    """A softmax over a dim that is sharded over tp (attention's is over tokens), and the sum over tokens."""
    plan, label_of = own.plan, own.local_block.labels.of
    for _, op in own:
        is_softmax = "softmax" in op.name and op.region != "attention"
        if is_softmax and plan.mesh.tp > 1 and own.is_forward and label_of(op.inputs[0]) == "split":
            yield own.call("all_reduce", own.elements(op.result_shape[:-1]) * LOSS_ITEM_BYTES, "tp", LOSS_CALLS)
        if op.name.startswith("nll_loss") and op.result_shape == ():
            size = max(LOSS_ITEM_BYTES, PRECISION_BYTES[op.dtype])
            if own.cp > 1:
                yield own.call("all_reduce", size, "cp")
            if plan.sequence_parallel and own.is_forward and label_of(op.inputs[0]) == "whole":
                yield own.call("all_reduce", size, "tp")


def _lookup_calls(own: BlockOps) -> Iterator[Call]:
    if not own.plan.sequence_parallel or own.is_forward:
        return
    for number, op in own:
        if is_whole_lookup(op) and own.local_block.labels.results[number] == "whole":
            size = own.elements(op.result_shape) * PRECISION_BYTES[op.dtype] / own.plan.mesh.tp
            yield own.call("all_gather", size, "tp")


def is_whole_lookup(op: Op) -> bool:
    """Whether an embedding looks up something else than tokens of the batch, such as positions."""
    return op.name == "embedding" and "@batch" not in op.inputs


def _result_bytes(op: Op, own: BlockOps) -> int:
    return round(op.written_bytes.at(own.plan.microbatch) * own.local_block.degrees.token_share)


# ---------------------------------------------------------------- cp


def _gathered_output_calls(own: BlockOps) -> Iterator[Call]:
    """The last of a run of blocks that cut their tokens gathers what it hands on; nothing in it is kept, so that no second forward
    does."""
    for tensor in own.local_block.gathered:
        part = round(tensor.num_bytes.at(own.plan.microbatch) * own.local_block.degrees.sent_share)
        if own.is_forward:
            yield own.call("all_gather", part, "cp")
        elif tensor.needs_gradient:
            yield own.call("reduce_scatter", part * own.cp, "cp")


def _ring_calls(own: BlockOps) -> Iterator[Call]:
    for number, op in own:
        item, tp = PRECISION_BYTES[op.dtype], own.local_block.tp_degree(number)
        if op.kind == "attention":
            count = sum(own.elements(shape) for shape in op.input_shapes[1:3]) / tp
            yield own.call("send", count * item, "cp", own.cp - 1)
            if not own.is_forward:
                yield own.call("send", count * max(item, ACCUMULATED_BYTES), "cp", own.cp)
        elif op.kind == "matmul" and op.region == "attention":
            size = round(own.elements(op.input_shapes[1]) * item / tp)
            yield (
                own.call("all_gather", size, "cp")
                if own.is_forward
                else own.call("reduce_scatter", size * own.cp, "cp")
            )


def _exchange_calls(own: BlockOps) -> Iterator[Call]:
    """Four exchanges an attention: of what it reads three, of what it makes one. Explicit attention is two matmuls."""
    num_matmuls = 0
    for number, op in own:
        exchanged: tuple[Shape, ...] = ()
        repeated = 1
        if op.kind == "attention":
            exchanged = (*op.input_shapes[:3], op.result_shape)
            repeated = own.local_block.repeats.get(op.inputs[1], 1)
        elif op.kind == "matmul" and op.region == "attention":
            exchanged = op.input_shapes[:2] if num_matmuls % 2 == 0 else (op.input_shapes[1], op.result_shape)
            num_matmuls += 1
        for place, shape in enumerate(exchanged):
            count = own.whole_elements(shape) * own.local_block.degrees.sent_share
            size = count * PRECISION_BYTES[op.dtype] / own.local_block.tp_degree(number)
            yield own.call("all_to_all", round(size) * (repeated if place in KEY_AND_VALUE else 1), "cp")


# ---------------------------------------------------------------- ep


def _expert_calls(own: BlockOps) -> Iterator[Call]:
    """Tokens to their experts and back: as many bytes as the experts' first matmuls read. Forward, ranks first tell each other
    how many come to each expert."""
    experts = own.local_block.experts
    if own.plan.mesh.ep == 1:
        return
    ops = own.local_block.kind.ops
    entered = {source for number, source in _entering(own.local_block.kind) if number in own.numbers}
    size = sum(_result_bytes(ops[source], own) for source in entered)
    if own.plan.sequence_parallel:  # each tp rank sends the rows of its own tokens
        size //= own.plan.mesh.tp
    if not size:
        return
    if own.is_forward:
        yield from (own.call("all_to_all", EXPERT_COUNT_BYTES * count, "ep") for count in experts)
    modules = max(1, len(experts))
    yield own.call("all_to_all", size // modules, "ep", 2 * modules)


@cached_in_value
def _entering(kind: Kind) -> tuple[tuple[int, int], ...]:
    """Matmuls of experts, each with the results from outside them that it reads: rows, not where each expert's rows end."""
    return tuple(
        (number, _before_cast(kind.ops, source))
        for number, op in kind.forward_ops
        if op.region == "expert" and op.kind == "matmul"
        for source in op.inputs
        if isinstance(source, int)
        and kind.ops[source].written_bytes.per_sample > 0
        and not _after_matmul(kind.ops, source)
    )


def _before_cast(ops: tuple[Op, ...], number: int) -> int:
    """Rows travel as the module is given them; autocast makes them narrow inside."""
    source = ops[number].inputs[0] if ops[number].name == "_to_copy" else None
    return _before_cast(ops, source) if isinstance(source, int) else number


def _after_matmul(ops: tuple[Op, ...], number: int) -> bool:
    """Whether a result inside the experts came of one of their matmuls."""
    op = ops[number]
    if op.region != "expert" or op.kind == "matmul":
        return op.region == "expert"
    return any(_after_matmul(ops, source) for source in op.inputs if isinstance(source, int))
