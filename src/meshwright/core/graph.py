"""A Graph: what a module computes and keeps, learned on fake tensors.

Quantities that grow with the number of samples are affine, `fixed + per_sample · n`: capture follows the module at two
batch sizes, so that one Graph serves every microbatch size.

A *kind* of block is written down once: its ops in order, and its *passes*. A pass is one stretch of the step inside the
block: which ops run, and which memory is taken and given back. The timeline says which pass of which block comes when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from math import prod
from typing import Literal

import msgspec

from meshwright.core.codec import Value, stable_hash
from meshwright.core.flow import NOTHING as NOTHING
from meshwright.core.flow import Affine as Affine
from meshwright.core.flow import Flow

CAPTURE_VERSION = 3
"""Raised when capture learns to see a module otherwise: graphs kept from before are then captured again."""

Phase = Literal["forward", "backward"]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
OpKind = Literal[
    "matmul", "convolution", "attention", "elementwise", "transcendental", "normalisation", "reduction", "copy"
]
Casting = Literal["autocast", "parameters"]
"""How 16-bit precision is reached: op by op from fp32 parameters (autocast), or with 16-bit parameters throughout."""
DType = Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
Region = Literal["", "attention", "expert"]
"""attention: ops between the projections, which selective recompute runs again. expert: ops of experts, sharded over ep."""

PRECISION_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element in the precision that a plan or an op computes in."""


Shape = tuple[Affine, ...]
Source = int | str
"""Where a tensor comes from: the number of an op of the same kind, the name of a parameter inside the block,
`@input` (outside the block), or `@BLOCK#NUMBER` (an op of another block, where neither block is repeated)."""


class Parameter(Value, kw_only=True):
    """One parameter tensor. `tied_to` names the parameter whose memory it shares."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    trainable: bool = True
    tied_to: str | None = None
    block: str = ""
    expert: bool = False
    """Whether it belongs to one of several experts: it is sharded over ep."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def own_name(self) -> str:
        """Its name inside its block."""
        return self.name.removeprefix(f"{self.block}.") if self.block else self.name


class Op(Value, kw_only=True):
    """`count` identical operations of one block and phase; flops and bytes are per operation."""

    name: str
    kind: OpKind
    phase: Phase
    dtype: Precision = "fp32"
    """The precision it computes in; under mixed precision ops differ."""
    module: str = ""
    """The module inside its block that runs it."""
    region: Region = ""
    causal: bool = False
    """Attention over what came before only: half of its flops are never done."""
    count: int = 1
    inputs: tuple[Source, ...] = ()
    input_shapes: tuple[Shape, ...] = ()
    """Shape of each input, in the same order."""
    result_shape: Shape = ()
    """Shape of its first result."""
    flops: Affine = NOTHING
    read_bytes: Affine = NOTHING
    written_bytes: Affine = NOTHING
    saved_bytes: Affine = NOTHING
    """Bytes of its results that are saved for backward."""

    @property
    def activation_shape(self) -> Shape:
        """Shape of the first input that has tokens: the activation that a weight is applied to."""
        return next((shape for shape in self.input_shapes if any(dim.per_sample for dim in shape)), ())

    @property
    def is_saved(self) -> bool:
        return bool(self.saved_bytes.per_sample or self.saved_bytes.fixed)


class MemoryEvent(msgspec.Struct, frozen=True, array_like=True):
    """Memory taken (bytes > 0) or given back (bytes < 0): which op's result it is, or where it came from."""

    source: Source
    num_bytes: Affine


class Pass(Value, kw_only=True):
    """A stretch of the step inside one block and phase: ops first_op … first_op + num_ops - 1 of its kind.

    Parameters, their gradients and the batch are not among the events.
    output_bytes: what the block hands on; all that a recomputed block keeps.
    """

    phase: Phase
    first_op: int = 0
    num_ops: int = 0
    events: tuple[MemoryEvent, ...] = ()
    output_bytes: Affine = NOTHING

    @property
    def op_range(self) -> range:
        return range(self.first_op, self.first_op + self.num_ops)

    def kept_at(self, num_samples: float) -> float:
        """How much more is in use when it ends than when it began (negative in backward)."""
        return sum(event.num_bytes.at(num_samples) for event in self.events)


class Kind(Value, kw_only=True, dict=True):
    """Blocks that do the same work share a kind. Results that follow from it alone are cached in it (rules/kinds.py)."""

    name: str
    ops: tuple[Op, ...]
    passes: tuple[Pass, ...] = ()

    @cached_property
    def forward_ops(self) -> tuple[tuple[int, Op], ...]:
        """The ops of forward with their numbers."""
        return tuple((number, op) for number, op in enumerate(self.ops) if op.phase == "forward")

    def flops(self, num_samples: int) -> float:
        """Forward and backward, without recompute."""
        return sum(op.count * op.flops.at(num_samples) for op in self.ops)


class Block(Value, kw_only=True):
    """One unit the search decides on, named by its module. The block named '' is everything outside the others."""

    name: str
    kind: str
    repeated: bool


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the timeline: a block, and which of its kind's passes runs."""

    block: str
    number: int


EVEN_SPREAD = "an even spread over experts"


class Guess(Value, kw_only=True):
    """A value the module read while it was followed, which fake tensors do not have, and what was answered."""

    module: str
    line: str
    """file:line of the code that read it."""
    question: str
    answer: str

    @property
    def is_surprising(self) -> bool:
        """Experts ask how many tokens come, and the answer is always the same: nobody has to be warned."""
        return not self.answer.endswith(EVEN_SPREAD)

    @property
    def words(self) -> str:
        return (
            f"module '{self.module or 'root'}' ({self.line}) asks for {self.question}, which fake tensors do not have: "
            f"the graph assumes {self.answer}"
        )


OWN_RECOMPUTE = (
    "the model's own activation checkpointing is left out: the plan decides what is recomputed (a plan made without --recompute "
    "recomputes its repeated blocks)"
)


class Graph(Value, kw_only=True, dict=True):
    """The computation of a module, captured on fake tensors: its parameters, blocks, ops, flops and bytes.

    Quantities that grow with the number of samples are affine (`Affine.at(samples)`). A graph belongs to one precision and casting;
    its `identity` follows from the parameters alone, so that a plan knows the model it was made for.
    """

    format: Literal[2] = 2
    model: str
    precision: Precision = "fp32"
    """The precision it was captured in: a plan in another precision needs another capture."""
    casting: Casting = "autocast"
    parameters: tuple[Parameter, ...]
    kinds: tuple[Kind, ...]
    blocks: tuple[Block, ...]
    timeline: tuple[Segment, ...]
    buffer_bytes: int
    batch_bytes: Affine
    tokens_per_sample: int
    gradient_order: tuple[str, ...] = ()
    """Parameters in the order their gradients become ready; without it, the reverse of their own order."""
    guesses: tuple[Guess, ...] = ()
    own_recompute: bool = False
    """Whether the model asks for activation checkpointing itself. It is left out of the graph: recompute is the plan's."""
    flow: Flow | None = None
    """The tensors that pass between blocks; None where they could not be followed."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that its user should read."""
        own = (OWN_RECOMPUTE,) if self.own_recompute else ()
        return (*own, *(guess.words for guess in self.guesses if guess.is_surprising))

    @cached_property
    def identity(self) -> str:
        """The identity of the model that a plan is made for: its parameters and their ties."""
        return identity(self.parameters)

    @cached_property
    def own_parameters(self) -> tuple[Parameter, ...]:
        """Each tensor once: tied names left out."""
        return tuple(parameter for parameter in self.parameters if parameter.tied_to is None)

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters; tied ones count once."""
        return sum(parameter.num_elements for parameter in self.own_parameters)

    @property
    def num_parameters_by_block(self) -> dict[str, int]:
        """Each tensor counts where its first name is."""
        found = {block.name: 0 for block in self.blocks}
        for parameter in self.own_parameters:
            found[parameter.block] += parameter.num_elements
        return found

    @cached_property
    def places_by_block(self) -> dict[str, tuple[int, ...]]:
        """Block → where its parameters, tied names too, stand in `parameters`."""
        found: dict[str, list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            found.setdefault(parameter.block, []).append(place)
        return {block: tuple(places) for block, places in found.items()}

    def parameters_of(self, blocks: Iterable[str]) -> Iterator[Parameter]:
        """The parameters of some blocks, in the graph's order."""
        places = sorted(place for block in blocks for place in self.places_by_block.get(block, ()))
        return (self.parameters[place] for place in places)

    @cached_property
    def repeated_blocks(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks if block.repeated)

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Trainable parameters in the order their gradients become ready; one that gets none comes last."""
        found = {parameter.name: parameter for parameter in self.own_parameters if parameter.trainable}
        ready = [found[name] for name in self.gradient_order if name in found]
        known = set(self.gradient_order)
        return (*ready, *(found[name] for name in reversed(found) if name not in known))

    @cached_property
    def kind_by_block(self) -> dict[str, Kind]:
        kinds = {kind.name: kind for kind in self.kinds}
        return {block.name: kinds[block.kind] for block in self.blocks}

    def flops(self, num_samples: int) -> float:
        """Forward and backward, without recompute."""
        per_kind = {kind.name: kind.flops(num_samples) for kind in self.kinds}
        return sum(per_kind[block.kind] for block in self.blocks)


def identity(parameters: tuple[Parameter, ...]) -> str:
    """A hash of names, shapes, ties and what is trained; neither dtype nor torch version changes it."""
    facts = sorted((p.name, p.shape, p.trainable, p.tied_to or "") for p in parameters)
    return stable_hash(facts)
