"""Attention over tokens that lie over c cp ranks: two ways, and how much each sends and works.

    heads   tokens are exchanged for heads by all-to-all: every rank attends with all tokens of some heads, then back.
            The heads of queries must divide over the ranks
    ring    every rank keeps its queries; keys and values go round the ranks, and what they give is merged by the logarithm
            of its sum of exponentials. No head is divided; heads of keys that several of queries share travel once

heads: where fewer heads of keys and values than of queries are exchanged, each is sent as often as it takes for every rank to
get the heads that its queries read:

    q query heads, k key heads, c ranks:   lcm(k, c) / k times      q is a multiple of k and of c, so also of lcm(k, c)

ring: a rank has one early and one late piece of the tokens, so that where none looks ahead all have as much to do. Tokens must
divide into 2 c pieces. Attention for which torch has no fused kernel (written out, with dropout, with a learned bias) gathers keys
and values instead.
"""

from __future__ import annotations

from math import lcm

from meshwright.core.graph import Graph, Op
from meshwright.core.plan import ContextWay

FUSED_DIMS = 4
"""Dims of the inputs of fused attention: [samples, heads, tokens, width]."""
ACCUMULATED_BYTES = 4
"""Least bytes of an element of the gradients that are added up while they go round the ring."""


def context_way(graph: Graph, tp: int, cp: int) -> ContextWay:
    """The plain choice: the exchange of heads, which shares out all work evenly, where heads divide."""
    if cp == 1:
        return "heads"
    heads = (num_heads(op)[0] for kind in graph.kinds for op in kind.ops)
    return "ring" if any(number % (tp * cp) for number in heads) else "heads"


def num_pieces(cp: int, context: ContextWay) -> int:
    """Into how many pieces the tokens of a sample divide."""
    return 2 * cp if context == "ring" else cp


def key_repeats(num_key_heads: int, cp: int) -> int:
    """How often each head of keys and values is sent. num_key_heads: heads of one tp rank."""
    return lcm(num_key_heads, cp) // num_key_heads


def num_heads(op: Op) -> tuple[int, int]:
    """Of queries, and of keys; 0 where the op is no attention.

    Explicit attention is a matmul batched over samples and heads: it makes [samples · heads, tokens, tokens].
    """
    if op.kind == "attention" and op.phase == "forward" and op.input_shapes and len(op.input_shapes[0]) == FUSED_DIMS:
        queries, keys, *_ = [round(shape[1].fixed) for shape in op.input_shapes if len(shape) == FUSED_DIMS]
        return queries, keys
    is_product = op.kind == "matmul" and op.phase == "forward" and op.region == "attention"
    has_scores = is_product and len(op.result_shape) == 3 and op.result_shape[0].per_sample > 0
    scores = round(op.result_shape[0].per_sample) if has_scores else 0
    return scores, scores
