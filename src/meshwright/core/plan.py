"""A Plan: every decision about how a model runs, as one plain value.

World = pp · dp · cp · tp; `ep` divides `dp`. Global batch = microbatch · num_microbatches · dp.
A plan names blocks by module names (`blocks.0-23`), never live objects. It can be written by hand, read on one screen,
diffed and committed. A plan refuses itself when it contradicts itself (`core/plan_check.py`); nothing is repaired.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import prod
from typing import Annotated, Literal

from msgspec import Meta

from meshwright.core.axes import AXES, MODEL_AXES, RANK_AXES, Axis
from meshwright.core.bounds import MOST_BLOCKS, MOST_RANKS, CountOrZero, Degree, Samples, Share
from meshwright.core.codec import CheckedValue
from meshwright.core.errors import PlanError
from meshwright.core.graph import Casting, Precision
from meshwright.core.names import expand_names
from meshwright.core.pipeline.kinds import ScheduleKind, kind_of, placement_of
from meshwright.core.pipeline.placement import Placement
from meshwright.core.plan_check import check_plan

__all__ = [
    "BlockSharding", "ContextWay", "Degree", "Mesh", "Offload", "Plan", "Recompute", "RecomputeMode", "ScheduleKind",
    "Stage", "TensorSharding", "ZeroStage",
    "casting_of", "placement_of", "stores_16_bits",
]  # fmt: skip

RecomputeMode = Literal["selective", "full"]
ZeroStage = Literal[0, 1, 2, 3]
ContextWay = Literal["heads", "ring"]
"""Context parallelism by heads (Ulysses) or as ring attention: rules/context.py."""


class PlanValue(CheckedValue, kw_only=True):
    """A plan, or a part of one."""

    def _refusal(self, problem: str) -> PlanError:
        return PlanError(problem)


class Mesh(PlanValue, kw_only=True, dict=True):
    """The named grid of ranks: the degree of each axis (core/axes.py)."""

    pp: Degree = 1
    dp: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dp % self.ep:
            raise PlanError(f"ep={self.ep} does not divide dp={self.dp}: experts live on subgroups of the dp ranks")
        if self.world > MOST_RANKS:
            raise PlanError(f"{' · '.join(RANK_AXES)} = {self.world} ranks: a plan has at most {MOST_RANKS}")

    @cached_property
    def world(self) -> int:
        """How many ranks it has."""
        return prod(getattr(self, axis) for axis in RANK_AXES)

    @cached_property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @cached_property
    def used(self) -> dict[str, int]:
        """Degrees above 1."""
        return {axis: degree for axis, degree in self.degrees.items() if degree > 1}

    @property
    def divides_model(self) -> bool:
        """Whether several ranks run one model together."""
        return any(axis in self.used for axis in MODEL_AXES)

    def stride(self, axis: Axis) -> int:
        """How far apart neighbours along an axis are, in numbers of ranks."""
        inner = RANK_AXES[RANK_AXES.index(AXES[axis].inside or axis) + 1 :]
        return prod(self.degrees[other] for other in inner)


if set(Mesh.__struct_fields__) != set(AXES):
    raise TypeError(f"a mesh has the axes {', '.join(Mesh.__struct_fields__)}, the table of axes {', '.join(AXES)}")


class Stage(PlanValue, kw_only=True):
    """Consecutive blocks on one pp coordinate."""

    coordinate: CountOrZero
    blocks: tuple[str, ...]


class TensorSharding(PlanValue, kw_only=True):
    """How one tensor is sharded over axes: one entry a dim, `""` where the dim is whole. `W[D, F_tp]` is `["", "tp"]`."""

    tensor: str
    dims: tuple[str, ...]
    runs: Degree = 1
    """Number of equal runs in the sharded dim (3: a fused query, key and value), each of which is cut."""
    reason: str = ""
    """Why a tensor that might be sharded is not."""


class BlockSharding(PlanValue, kw_only=True):
    """Tensor shardings of a block kind (`for_kind`), or of single blocks that differ (`for_blocks`)."""

    for_kind: str | None = None
    for_blocks: tuple[str, ...] = ()
    tensors: tuple[TensorSharding, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.for_kind is None) == (not self.for_blocks):
            raise PlanError("a sharding is given either for_kind or for_blocks, not both and not neither")


class Recompute(PlanValue, kw_only=True):
    """Activation checkpointing of the named blocks: their whole forward, or the attention core alone, is recomputed in backward."""

    mode: RecomputeMode
    blocks: tuple[str, ...]


class Offload(PlanValue, kw_only=True):
    """State that is kept off the device: its kind, its place, its share, and whether its update may run one step late."""

    what: Literal["none", "optimizer", "parameters"] = "none"
    where: Literal["host", "disk"] = "host"
    folder: str = ""
    """With `where="disk"`, the folder on every host; each rank has a folder of its own in it."""
    share: Share = 1.0
    moments: Literal["fp32", "bf16"] = "fp32"
    """How Adam's two moments are kept on the host: in 16 bits they take 4 bytes a parameter less."""
    delayed: bool = False
    warmup_steps: CountOrZero = 40
    """Steps before updates may be late: gradients change fastest at the beginning."""
    window: Annotated[int, Meta(ge=2, le=MOST_BLOCKS)] = 2
    """Number of streamed blocks on the device: the block that runs, and the blocks that are prefetched."""
    stash: Literal["device", "host"] = "device"
    """Where the inputs of streamed blocks wait for backward."""
    activations: tuple[str, ...] = ()
    """Blocks whose activations wait on the host for backward, instead of being kept or recomputed."""


class Plan(PlanValue, kw_only=True, dict=True):
    """Every decision about how a model runs on a cluster: read it, edit it, save it, run it.

        plan = mw.plan("gpt:layers=12,hidden=768,heads=12,seq=1024,vocab=50304", "a100-80g-selene", global_batch=64).plan
        plan.save("plan.json")                      # or .toml; the same file for every rank
        plan = mw.Plan.load("plan.json")            # a file that contradicts itself is refused with what and where
        print(plan.mesh, plan.num_microbatches, plan.recompute_words)

    mesh                      degrees of the axes: pp (pipeline), dp (data), cp (context), tp (tensor), ep (expert, divides dp)
    stages                    which blocks (by module name) run on which pp coordinate; virtual: stages on each coordinate
    sharding                  which dims of which weights lie over tp and ep; the rest of the model follows from it
    sequence_parallel         activations between tensor-parallel regions are sharded along the sequence
    context, token_blocks     under cp: attention by heads (Ulysses) or in a ring; where tokens are cut
    zero, hybrid              ZeRO stage 0 to 3; ranks in one sharding group (HSDP), where not all
    recompute                 blocks under activation checkpointing: full, or the attention alone (selective)
    offload                   what is kept on the host or a disk, which share of it, and whether its update may be a step late
    schedule                  the order of forwards and backwards over pp
    microbatch, num_microbatches, global_batch
                              samples per microbatch and dp rank; microbatch · num_microbatches · dp = global_batch
    precision, compile        what is computed in; whether blocks are compiled
    sync_batch_norm           batch norm over the samples of all dp ranks
    model, graph, cluster     what it was made for: `apply` refuses another model

    A plan is frozen: `msgspec.structs.replace(plan, zero=2)` gives another one.
    """

    format: Literal[1] = 1
    model: str = ""
    graph: str = ""
    """Identity of the graph it was made for; `apply` refuses another. Empty in a plan written for any model."""
    cluster: str = ""
    """Hash of the cluster it was made for."""
    mesh: Mesh = Mesh()
    stages: Annotated[tuple[Stage, ...], Meta(max_length=MOST_BLOCKS)]
    sharding: tuple[BlockSharding, ...] = ()
    sequence_parallel: bool = False
    context: ContextWay = "heads"
    """Under cp: all-to-all between tokens and heads (Ulysses), or ring attention."""
    token_blocks: tuple[str, ...] = ()
    """Under cp, where the model looks up no tokens: blocks that cut what they are called with, [samples, tokens, width]. An entry
    is a run of blocks, which gathers its tokens again where it ends (rules/tokens.py)."""
    zero: ZeroStage = 0
    hybrid: Degree | None = None
    """Ranks in one sharding group of ZeRO (HSDP); without it, all dp · cp ranks that hold the same parameters."""
    recompute: tuple[Recompute, ...] = ()
    offload: Offload = Offload()
    schedule: ScheduleKind = "1f1b"
    virtual: Degree = 1
    """Stages on each pp coordinate."""
    microbatch: Samples
    """Samples per microbatch per dp rank."""
    num_microbatches: Samples
    global_batch: Samples
    precision: Precision = "fp32"
    compile: bool = False
    sync_batch_norm: bool = False
    """Whether batch norm takes its statistics over the samples of all dp ranks, rather than of each alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_plan(self)

    @property
    def world(self) -> int:
        """How many ranks it runs on."""
        return self.mesh.world

    @property
    def casting(self) -> Casting:
        """How it reaches 16 bits: whole parameters by autocast, sharded parameters by gathering them in 16 bits, and parameters
        with master weights on the host by storing them in 16 bits."""
        return casting_of(self.precision, self.zero, self.stores_16_bits)

    @property
    def stores_16_bits(self) -> bool:
        """Whether the device holds parameters in 16 bits, and the fp32 master weights are part of the optimizer state."""
        return stores_16_bits(self.precision, self.offload.what, self.world)

    @property
    def master_bytes(self) -> int:
        """Bytes of one element of the master weights: fp32, or fp64 in fp64."""
        return 8 if self.precision == "fp64" else 4

    @property
    def splits_backward(self) -> bool:
        """Whether its pipeline schedule runs backward in halves: gradients of inputs, then gradients of weights."""
        return self.mesh.pp > 1 and kind_of(self.schedule).splits_backward

    @property
    def placement(self) -> Placement:
        """The placement of stages on pp coordinates by its schedule."""
        return placement_of(self.schedule)

    @cached_property
    def blocks_by_stage(self) -> tuple[tuple[str, ...], ...]:
        return tuple(expand_names(stage.blocks) for stage in self.stages)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Every block, in order."""
        return expand_names(pattern for stage in self.stages for pattern in stage.blocks)

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Block → the number of its stage."""
        return {name: number for number, names in enumerate(self.blocks_by_stage) for name in names}

    def stages_on(self, coordinate: int) -> list[int]:
        """Numbers of the stages on a pp coordinate, in order."""
        return [number for number, stage in enumerate(self.stages) if stage.coordinate == coordinate]

    @property
    def shard_degree(self) -> int:
        """Over how many ranks ZeRO splits: 1 where nothing is sharded."""
        if self.zero == 0:
            return 1
        return self.hybrid or self.mesh.dp * self.mesh.cp

    def recomputed(self, mode: RecomputeMode) -> frozenset[str]:
        """Names of the blocks under one recompute mode."""
        return frozenset(name for rule in self.recompute if rule.mode == mode for name in expand_names(rule.blocks))

    @property
    def recompute_words(self) -> str:
        """none, or the modes with the number of blocks each."""
        counts = Counter[str]()
        for rule in self.recompute:
            counts[rule.mode] += len(expand_names(rule.blocks))
        return " + ".join(f"{mode} ({count} blocks)" for mode, count in counts.items()) or "none"


def casting_of(precision: Precision, zero: int, stores_16_bits: bool = False) -> Casting:
    return "parameters" if precision in ("bf16", "fp16") and (zero > 0 or stores_16_bits) else "autocast"


def stores_16_bits(precision: Precision, offload: str, world: int) -> bool:
    """fp16 needs fp32 gradients to unscale; where ranks share parameters, they are gathered in 16 bits from fp32 shards."""
    return precision == "bf16" and offload != "none" and world == 1
