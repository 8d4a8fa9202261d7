"""A local block: the part of a block that one rank computes and holds, under tp, sequence parallel, cp and ep.

    tp    an op on a split tensor does 1/tp of its work, and its result takes 1/tp of the memory       (rules/labels.py)
    sp    between the split parts, tokens lie over tp: whole tensors with tokens take 1/tp too
    cp    tokens lie over cp: every quantity that grows with the samples takes 1/cp; where cp does not divide n tokens, ⌈n/cp⌉/n,
          the share of the first ranks
    ep    experts lie over ep: each rank keeps 1/ep of their weights, and works on as many tokens as without ep

A quantity has tokens where it grows with the samples; weights and their gradients do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from meshwright.core.flow import FlowTensor
from meshwright.core.graph import PRECISION_BYTES, Graph, Kind, Op, Source
from meshwright.core.plan import Plan
from meshwright.cost.compute.fusion import Fused, fused_groups
from meshwright.cost.degrees import Degrees, check_divides, experts_by_block
from meshwright.rules.context import ACCUMULATED_BYTES, FUSED_DIMS, key_repeats
from meshwright.rules.kinds import cached_in_value
from meshwright.rules.labels import Label, Labels, Way, labels_of
from meshwright.rules.sharding import ways_by_block
from meshwright.rules.tokens import TokenBlocks, cut_in_blocks, looked_up_tokens, output_tensors, stream_of

RING_LAUNCHES = 9
"""Kernels for one piece of a ring: the attention, merging its result or adding up its gradients, and copies for sending it.
Origin: counted."""


@dataclass(frozen=True)
class LocalBlock:
    """The ops of one kind of block, as one rank runs them."""

    kind: Kind
    labels: Labels
    degrees: Degrees
    experts: tuple[int, ...] = ()
    """How many experts each of the block's modules of experts has, on all ranks together."""
    gathered: tuple[FlowTensor, ...] = ()
    """Outputs that the block gathers before it hands them on: of the last block in a run of blocks that cut their tokens."""

    @cached_property
    def fused(self) -> Fused:
        """The block's fused groups of ops, where it runs compiled; compute and memory both need them."""
        return fused_groups(self.kind)

    @cached_property
    def repeats(self) -> dict[Source, int]:
        """Keys and values → how often each head is exchanged and kept, where they have fewer heads than cp ranks. In a ring, keys
        and values of explicit attention are gathered and kept whole."""
        found: dict[Source, int] = {}
        if self.degrees.context == "ring":
            products = (op for _, op in self.kind.forward_ops if op.kind == "matmul" and op.region == "attention")
            return {op.inputs[1]: self.degrees.cp for op in products}
        for number, op in self.kind.forward_ops if self.degrees.cp > 1 else ():
            if op.kind == "attention":
                tp = self.tp_degree(number)
                for source, shape in zip(op.inputs[1:3], op.input_shapes[1:3], strict=False):
                    if len(shape) == FUSED_DIMS:
                        found[source] = key_repeats(round(shape[1].fixed) // tp, self.degrees.cp)
        return found

    def work_share(self, number: int) -> float:
        """The share of an op's work that one rank does."""
        tokens = self.degrees.token_share if _has_tokens(self.kind.ops[number]) else 1.0
        return tokens / self.tp_degree(number)

    def is_ring_attention(self, op: Op) -> bool:
        """Whether the op is an attention whose keys and values go round the cp ranks."""
        return self.degrees.is_ring and op.kind == "attention"

    @cached_property
    def launches_by_op(self) -> tuple[int, ...]:
        """Kernels of every op, over all its `count` repetitions: ring attention has its own kernels for each rank's piece."""
        each = RING_LAUNCHES * self.degrees.cp
        return tuple(op.count * (each if self.is_ring_attention(op) else 1) for op in self.kind.ops)

    @cached_property
    def cost_keys(self) -> tuple[tuple[float, int, bool, Label], ...]:
        """For every op, the sharding its time depends on; the op itself and the number of samples are the other inputs."""
        share = self.degrees.token_share
        return tuple(
            (share, self.tp_degree(number), self.along_tokens(number), self.labels.results[number])
            for number in range(len(self.kind.ops))
        )

    def ring_message_bytes(self, number: int, samples: float) -> float:
        """Bytes of messages that ring attention holds in addition to its tensors: in forward two messages of keys and values; in
        backward also two of the sums of their gradients, and one that is being added."""
        op = self.kind.ops[number]
        if not self.is_ring_attention(op):
            return 0.0
        backward = op.phase == "backward"
        shapes = op.input_shapes[2:4] if backward else op.input_shapes[1:3]
        count = sum(prod(dim.at(samples) for dim in shape) for shape in shapes)
        count /= self.degrees.cp * self.tp_degree(number)
        item = PRECISION_BYTES[op.dtype]
        return count * (2 * item + (3 * max(item, ACCUMULATED_BYTES) if backward else 0))

    def tp_degree(self, number: int) -> int:
        return self.degrees.tp if self.labels.work_split[number] or self.along_tokens(number) else 1

    def along_tokens(self, number: int) -> bool:
        """Whether sequence parallel gives each tp rank a part of the op's tokens."""
        is_whole = self.degrees.sequence_parallel and not self.labels.work_split[number]
        return is_whole and _has_tokens(self.kind.ops[number])

    def on(self, rank: int) -> LocalBlock:
        """The same block on another rank of cp."""
        degrees = self.degrees
        return replace(self, degrees=replace(degrees, rank=rank)) if degrees.tokens % degrees.cp else self

    @property
    def output_share(self) -> float:
        """The share of the block's output bytes that one rank has."""
        return self.result_share("@input") / (self.degrees.token_share if self.gathered else 1)

    @cached_in_value
    def result_share(self, source: Source) -> float:
        """The share of a tensor's bytes that one rank holds. Tensors from outside the block are whole along tp."""
        degrees = self.degrees
        if isinstance(source, int):
            tokens = degrees.token_share if self.kind.ops[source].written_bytes.per_sample > 0 else 1.0
            tokens *= self.repeats.get(source, 1)
        else:
            tokens = degrees.token_share
        is_part = self.labels.of(source) == "split" or degrees.sequence_parallel
        return tokens / degrees.tp if is_part else tokens


def _has_tokens(op: Op) -> bool:
    """Whether the op's work grows with the samples. The work on a weight's gradient does, though the gradient does not."""
    return op.read_bytes.per_sample > 0 or op.written_bytes.per_sample > 0 or op.flops.per_sample > 0


def make_local_blocks(graph: Graph, plan: Plan) -> dict[str, LocalBlock]:
    """Block name → its local block. Blocks of one kind under one sharding share a LocalBlock."""
    check_divides(graph, plan)
    ways = ways_by_block(plan, graph)
    kinds = graph.kind_by_block
    degrees = Degrees(plan.mesh.tp, plan.mesh.cp, plan.sequence_parallel, plan.context)
    labels = _labels(graph, kinds, ways)
    experts = experts_by_block(graph)
    tokens = cut_in_blocks(graph, plan.mesh.cp)
    ends = {run[-1] for run in tokens.runs} if tokens else set()
    made: dict[tuple[int, tuple[FlowTensor, ...]], LocalBlock] = {}
    found = {}
    for name in kinds:
        gathered = output_tensors(kinds[name]) if name in ends else ()
        own = _degrees_of(graph, name, degrees, tokens)
        local_block = LocalBlock(kinds[name], labels[name], own, experts.get(name, ()), gathered)
        found[name] = made.setdefault((id(labels[name]), gathered), local_block)
    return found


def _degrees_of(graph: Graph, block: str, degrees: Degrees, tokens: TokenBlocks | None) -> Degrees:
    """The degrees with the number of tokens that are sharded over cp in the block; a block that cuts no tokens has cp = 1."""
    if tokens is None:
        return replace(degrees, tokens=looked_up_tokens(graph))
    stream = stream_of(graph.kind_by_block[block])
    if block not in tokens.blocks or stream is None:
        return replace(degrees, cp=1)
    return replace(degrees, tokens=round(stream[1].fixed))


def _labels(graph: Graph, kinds: dict[str, Kind], ways: dict[str, dict[str, Way]]) -> dict[str, Labels]:
    """Labels of each block. Repeated blocks are labelled alone; the other blocks three times over, since they read each other's
    results in forward and backward."""
    shared: dict[tuple[str, int], Labels] = {}
    single = [block.name for block in graph.blocks if not block.repeated]
    found = {}
    for block in graph.blocks:
        if block.repeated:
            key = (block.kind, id(ways[block.name]))
            if key not in shared:
                shared[key] = labels_of(kinds[block.name], ways[block.name])
            found[block.name] = shared[key]
    outside: dict[Source, Label] = {}
    for _ in range(3 if any(ways[name] for name in single) else 1):
        for name in sorted(single, key=lambda name: name == ""):
            found[name] = labels_of(kinds[name], ways[name], outside)
            outside |= {f"@{name}#{number}": label for number, label in enumerate(found[name].results)}
    return found
