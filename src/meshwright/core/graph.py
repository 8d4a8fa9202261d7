"""A Graph: what a module computes and keeps, learned on fake tensors.

Quantities that grow with the number of samples are affine, `fixed + per_sample · n`: capture follows the module at two
batch sizes, so that one Graph serves every microbatch size.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from meshwright.core.codec import Value, stable_hash

Phase = Literal["forward", "backward"]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
OpKind = Literal[
    "matmul", "convolution", "attention", "elementwise", "transcendental", "normalisation", "reduction", "copy"
]
DType = Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]

ITEM_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class Affine(msgspec.Struct, frozen=True, array_like=True):
    """`fixed + per_sample · num_samples`, written as two numbers."""

    fixed: float
    per_sample: float

    def at(self, num_samples: int) -> float:
        return self.fixed + self.per_sample * num_samples


class Parameter(Value, kw_only=True):
    """One parameter tensor. `tied_to` names the parameter whose memory it shares."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    trainable: bool = True
    tied_to: str | None = None
    block: str = ""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Op(Value, kw_only=True):
    """`count` identical operations of one block and phase; flops and bytes are those of one of them."""

    name: str
    kind: OpKind
    phase: Phase
    dtype: Precision = "fp32"
    """What it computes in; under mixed precision ops differ."""
    count: int
    flops: Affine
    read_bytes: Affine
    written_bytes: Affine


class Kind(Value, kw_only=True):
    """Blocks that do the same work share a kind."""

    name: str
    ops: tuple[Op, ...]


class Block(Value, kw_only=True):
    """One unit the search decides on, named by its module. The block named '' is what lies outside all others."""

    name: str
    kind: str
    repeated: bool


class Segment(Value, kw_only=True):
    """A stretch of the step inside one block and phase.

    kept_bytes: how much more memory is in use when it ends than when it began (negative in backward).
    peak_bytes: what is in use at its fullest moments, above its beginning; which of them is fullest depends on the number
        of samples, so all that can be are kept.
    output_bytes: what the block hands on; all that a recomputed block keeps.
    Parameters, their gradients and the batch are not counted here.
    """

    phase: Phase
    block: str
    kept_bytes: Affine
    peak_bytes: tuple[Affine, ...]
    output_bytes: Affine

    def peak_at(self, num_samples: int) -> float:
        return max((moment.at(num_samples) for moment in self.peak_bytes), default=0.0)


class Graph(Value, kw_only=True):
    format: Literal[1] = 1
    model: str
    precision: Precision = "fp32"
    """What it was captured in: a plan in another precision needs another capture."""
    parameters: tuple[Parameter, ...]
    kinds: tuple[Kind, ...]
    blocks: tuple[Block, ...]
    timeline: tuple[Segment, ...]
    buffer_bytes: int
    batch_bytes: Affine
    tokens_per_sample: int
    gradient_order: tuple[str, ...] = ()
    """Parameters in the order their gradients become ready; without it, the reverse of their own order."""

    @property
    def identity(self) -> str:
        """What a plan is made for: the parameters and how they are tied."""
        return identity(self.parameters)

    @property
    def own_parameters(self) -> tuple[Parameter, ...]:
        """Each tensor once: tied names left out."""
        return tuple(parameter for parameter in self.parameters if parameter.tied_to is None)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.num_elements for parameter in self.own_parameters)

    @property
    def repeated_blocks(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks if block.repeated)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """Trainable parameters in the order their gradients become ready; one that gets none comes last."""
        found = {parameter.name: parameter for parameter in self.own_parameters if parameter.trainable}
        ready = [found[name] for name in self.gradient_order if name in found]
        return (*ready, *(found[name] for name in reversed(found) if name not in self.gradient_order))

    def kind_of(self, block: Block) -> Kind:
        return next(kind for kind in self.kinds if kind.name == block.kind)

    def flops(self, num_samples: int) -> float:
        """Forward and backward, without recompute."""
        per_kind = {kind.name: sum(op.count * op.flops.at(num_samples) for op in kind.ops) for kind in self.kinds}
        return sum(per_kind[block.kind] for block in self.blocks)


def identity(parameters: tuple[Parameter, ...]) -> str:
    """A hash of names, shapes, ties and what is trained; neither dtype nor torch version changes it."""
    facts = sorted((p.name, p.shape, p.trainable, p.tied_to or "") for p in parameters)
    return stable_hash(facts)
