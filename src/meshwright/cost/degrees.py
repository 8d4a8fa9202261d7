"""Degrees of tp and cp: over how many ranks a block's work is divided, and which degrees divide a model."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

from meshwright.core.errors import PlanError
from meshwright.core.graph import Graph, Kind
from meshwright.core.plan import ContextWay, Plan
from meshwright.rules.context import num_heads, num_pieces
from meshwright.rules.divisors import check_experts
from meshwright.rules.labels import Way, labels_of
from meshwright.rules.sharding import ways_by_block
from meshwright.rules.tokens import TokenBlocks, cut_in_blocks, looked_up_counts, looked_up_tokens, stream_of

STACKED_DIMS = 3
"""Matrices of several experts in one parameter."""


@dataclass(frozen=True)
class Degrees:
    """Over how many ranks work is divided."""

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    context: ContextWay = "heads"
    tokens: int = 0
    """Tokens of a sample, where they are sharded over cp."""
    rank: int = 0
    """Along cp: where tokens do not divide, the first ranks have the most."""

    @property
    def is_ring(self) -> bool:
        """Whether keys and values go round the cp ranks."""
        return self.context == "ring" and self.cp > 1

    @property
    def token_share(self) -> float:
        """The share of the tokens that the rank has."""
        each, rest = divmod(self.tokens, self.cp)
        return (each + (self.rank < rest)) / self.tokens if rest else 1 / self.cp

    @property
    def sent_share(self) -> float:
        """The share of the tokens that a rank sends along cp: that of the first rank, so that all ranks send equal sizes."""
        return ceil(self.tokens / self.cp) / self.tokens if self.tokens % self.cp else 1 / self.cp


def experts_by_block(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Block → the number of experts of each module in it that holds some, stacked."""
    modules = {
        parameter.name.rpartition(".")[0]: (parameter.block, parameter.shape[0])
        for parameter in graph.parameters
        if parameter.expert and len(parameter.shape) == STACKED_DIMS
    }
    found: dict[str, tuple[int, ...]] = {}
    for block, count in modules.values():
        found[block] = (*found.get(block, ()), count)
    return found


def check_divides(graph: Graph, plan: Plan) -> None:
    """Degrees that do not divide the model, and tp that splits nothing, are refused."""
    check_degrees(graph, plan)
    tp = plan.mesh.tp
    if tp > 1 and not plan.sharding:
        raise PlanError(
            f"the plan has tp={tp} but splits no tensor of '{graph.model}': set tp to 1, or name tensors to split in its `sharding`"
        )


def check_degrees(graph: Graph, plan: Plan) -> None:
    """Heads that do not divide over tp and cp, experts over ep, and sequences over cp, are refused."""
    tp, cp = plan.mesh.tp, plan.mesh.cp
    for counts in experts_by_block(graph).values():
        check_experts(counts, plan.mesh)
    if plan.sequence_parallel and tp == 1:
        raise PlanError("sequence parallel shards tokens over tp, but tp=1: leave it out, or raise tp")
    tokens, in_blocks = looked_up_tokens(graph), cut_in_blocks(graph, cp)
    if in_blocks is not None and in_blocks.refusal:
        raise PlanError(
            f"cp={cp} cuts samples by their tokens, but '{graph.model}' looks up no tokens, and {in_blocks.refusal}: set cp to 1"
        )
    numbers = _numbers_of_tokens(graph, in_blocks)
    for number in numbers if cp > 1 else ():
        if plan.context == "ring" and number % num_pieces(cp, plan.context):
            raise PlanError(
                f"{number} tokens a sample do not divide over cp={cp}, two pieces each, as a ring needs: change the sequence "
                "length or cp, or set context to heads"
            )
        if number < cp:
            raise PlanError(f"{number} tokens a sample are too few for cp={cp}: change the sequence length or cp")
    if in_blocks is None and len(numbers) > 1 and any(number % cp for number in numbers):
        raise PlanError(
            f"a sample has {' and '.join(map(str, sorted(numbers)))} tokens, which do not all divide over cp={cp}: change lengths "
            "of sequences, or cp"
        )
    if plan.sequence_parallel and not tokens:
        raise PlanError(
            f"sequence parallel shards tokens over tp, but '{graph.model}' looks up no tokens: leave it out"
        )
    if plan.sequence_parallel and tokens % (tp * cp):
        raise PlanError(
            f"{tokens} tokens a sample do not divide over tp · cp = {tp * cp}, as sequence parallel needs: change a degree or "
            "the sequence length"
        )
    ways = ways_by_block(plan, graph) if plan.sharding else {}
    whole = {
        graph.kind_by_block[block.name].name
        for block in graph.blocks
        if in_blocks and block.name not in in_blocks.blocks
    }
    for kind in graph.kinds:
        _check_attention(
            kind,
            plan,
            1 if kind.name in whole else cp,
            [ways[block.name] for block in graph.blocks if block.kind == kind.name and ways],
        )


def _numbers_of_tokens(graph: Graph, in_blocks: TokenBlocks | None) -> set[int]:
    """Numbers of tokens that are cut over cp."""
    if in_blocks is None:
        return set(looked_up_counts(graph))
    streams = (stream_of(graph.kind_by_block[name]) for name in in_blocks.blocks)
    return {round(stream[1].fixed) for stream in streams if stream is not None}


def _check_attention(kind: Kind, plan: Plan, cp: int, ways: list[dict[str, Way]]) -> None:
    """Under cp the heads of queries may be what tokens are exchanged for; fewer heads of keys are repeated.

    ways: of the kind's blocks, where the plan says what it splits: attention that it leaves whole has no heads to divide.
    """
    tp = plan.mesh.tp
    for number, op in enumerate(kind.ops):
        heads, key_heads = num_heads(op)
        if heads and (heads % tp or key_heads % tp):
            different = {
                id(way): way for way in ways if way
            }.values()  # where the plan splits nothing, heads are taken to be split
            if different and not any(labels_of(kind, way).work_split[number] for way in different):
                continue
            few = f" and {key_heads} of keys and values" if key_heads != heads else ""
            common = gcd(heads, key_heads)
            raise PlanError(
                f"{heads} attention heads{few} in blocks of kind '{kind.name}' do not divide over tp={tp}: "
                + (f"use a divisor of {common}" if common > 1 else "set tp to 1, or divide the model by other axes")
            )
        if cp > 1 and plan.context == "heads" and heads % (tp * cp):
            raise PlanError(
                f"{heads} attention heads in blocks of kind '{kind.name}' do not divide over tp · cp = {tp * cp}, as the exchange "
                f"of tokens for heads needs: use divisors of {heads}, or set context to ring"
            )
