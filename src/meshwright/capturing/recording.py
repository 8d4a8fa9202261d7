"""What one trace writes down, in order: ops, memory taken and given back, blocks left, blocks skipped."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.core.graph import Guess, OpKind, Phase, Precision, Region, Source

BATCH = "@batch"
INPUT = "@input"


@dataclass(slots=True)
class TracedOp:
    """An op at one batch size. Its sources are numbers of ops of the whole trace, or full names of parameters."""

    name: str
    kind: OpKind
    phase: Phase
    dtype: Precision
    block: str
    module: str
    inputs: tuple[Source, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    result_shape: tuple[int, ...]
    flops: float
    read_bytes: float
    written_bytes: float
    causal: bool = False
    made_by: int | None = None
    """In backward: the forward op whose autograd node this op belongs to."""
    region: Region = ""
    saved_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that happened in a phase of a block."""

    phase: Phase
    block: str


@dataclass(frozen=True, slots=True)
class OpEntry(Entry):
    number: int


@dataclass(frozen=True, slots=True)
class MemoryEntry(Entry):
    """A storage is born (bytes > 0) or dies (bytes < 0)."""

    storage: int
    num_bytes: int
    shared: bool = False
    """Whether several blocks read it: that it dies in this one is only due to the order of blocks."""


@dataclass(frozen=True, slots=True)
class ExitEntry(Entry):
    """A block returned. `output_bytes`: what it made itself and hands on."""

    output_bytes: int


@dataclass(frozen=True, slots=True)
class SkipEntry(Entry):
    """A block that was not followed: here it would have done what its representative does."""


@dataclass
class Recording:
    ops: list[TracedOp] = field(default_factory=list)
    log: list[Entry] = field(default_factory=list)
    makers: dict[int, int] = field(default_factory=dict)
    """Storage → the op that first wrote it."""
    gradient_storages: set[int] = field(default_factory=set)
    gradient_order: list[str | SkipEntry] = field(default_factory=list)
    """Parameters in the order their gradients become ready; a skipped block stands for all of its own."""
    representatives: dict[str, str] = field(default_factory=dict)
    """Skipped block → the block that was followed in its place."""
    guesses: dict[Guess, None] = field(default_factory=dict)
    own_recompute: bool = False
    entered: dict[str, bool] = field(default_factory=dict)
    """Blocks in the order they are entered in forward → whether they are called as a whole, not part by part."""
    batch_bytes: int = 0
    buffer_bytes: int = 0
