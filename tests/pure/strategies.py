"""Hypothesis strategies and small hand-made values, shared by the pure tests.

`values(kind)` reads the annotations of a value and makes legal ones; one that can refuse itself has its own strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import Phase, settings
from hypothesis import strategies as st

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Affine, Block, Graph, Kind, Op, Parameter
from meshwright.core.names import compact_names, expand_names
from meshwright.core.pipeline.kinds import ScheduleKind, kind_of, placement_of
from meshwright.core.pipeline.placement import Placement, coordinate_of
from meshwright.core.plan import (
    BlockSharding,
    Mesh,
    Offload,
    Plan,
    Recompute,
    Stage,
    TensorSharding,
)
from meshwright.core.request import PlanRequest

T = TypeVar("T")

quick = settings(phases=set(Phase) - {Phase.explain})

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
degrees = st.integers(1, 4)
module_names = st.lists(
    st.one_of(st.integers(0, 12).map(str), st.from_regex(r"[a-z_][a-z0-9_]{0,3}", fullmatch=True)),
    min_size=1,
    max_size=4,
).map(".".join)


FEWER: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    Cluster: {"num_hosts": st.integers(1, 2**10), "devices_per_host": st.integers(1, 2**10)}
}
"""Fields whose product has a limit."""


def values(kind: type[T]) -> st.SearchStrategy[T]:
    """Legal values of a struct, from its annotations."""
    own: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {Plan: plans, Mesh: meshes, PlanRequest: requests}
    if kind in own:
        return own[kind]()
    hints = get_type_hints(kind, include_extras=True)
    bounded = FEWER.get(kind, {})
    return st.builds(kind, **{name: bounded.get(name) or _of(hint) for name, hint in hints.items()})


def _of(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is Annotated:
        return _number(arguments[0], arguments[1])
    if origin in (Union, UnionType):
        return st.one_of(*map(_of, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_of, arguments))
    if origin is dict:
        return st.dictionaries(_of(arguments[0]), _of(arguments[1]), max_size=2)
    if hint in (int, float):
        return _number(hint, msgspec.Meta())
    plain = {str: words, bool: st.booleans(), type(None): st.none()}
    return plain[hint] if hint in plain else st.deferred(lambda: values(hint))


def _number(kind: type, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    low = meta.gt if meta.gt is not None else meta.ge
    if kind is int:
        return st.integers(-(2**53) if low is None else int(low) + (meta.gt is not None), meta.le or 2**53)
    return st.floats(low, meta.le, exclude_min=meta.gt is not None, allow_nan=False, allow_infinity=False)


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([part for part in range(1, number + 1) if number % part == 0])


def virtuals(schedule: ScheduleKind) -> st.SearchStrategy[int]:
    """How many stages a coordinate may have."""
    fewest, most = kind_of(schedule).turns
    return st.integers(fewest, min(4, most))


@st.composite
def schedule_sizes(
    draw: st.DrawFn, kinds: tuple[ScheduleKind, ...] = get_args(ScheduleKind), most: int = 6
) -> tuple[ScheduleKind, int, int, int]:
    """Legal arguments of `make_schedule` and `make_order`."""
    kind = draw(st.sampled_from(kinds))
    num_coordinates = draw(st.integers(1, most))
    least = kind_of(kind).least_microbatches(num_coordinates)
    return kind, num_coordinates, draw(st.integers(least, least + 3 * most)), draw(virtuals(kind))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    dp = draw(degrees)
    return Mesh(pp=draw(degrees), dp=dp, cp=draw(degrees), tp=draw(degrees), ep=draw(divisors(dp)))


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    hints = get_type_hints(PlanRequest, include_extras=True)
    fields = {name: draw(_of(hint)) for name, hint in hints.items() if not name.startswith(("recompute", "offload"))}
    recompute = draw(st.sampled_from([None, "none", "selective", "full", "every:1", "every:12"]))
    offload = draw(st.sampled_from([None, "none", "optimizer", "parameters"]))
    how = {name: draw(_of(hints[name])) for name in ("offload_share", "offload_delayed")}
    return PlanRequest(**fields, recompute=recompute, offload=offload, **(how if offload not in (None, "none") else {}))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Legal plans of every shape: any mesh, schedule, sharding, ZeRO stage and recompute rule."""
    mesh = draw(meshes())
    schedule = draw(_of(ScheduleKind))
    virtual = draw(virtuals(schedule))
    blocks = draw(st.lists(module_names, min_size=1, max_size=12, unique=True))
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    microbatch, num_microbatches = draw(degrees), draw(degrees)
    rules = draw(_recompute_rules(blocks))
    return Plan(
        model=draw(words),
        graph=draw(words),
        cluster=draw(words),
        mesh=mesh,
        stages=draw(_stages(blocks, mesh.pp, virtual, placement_of(schedule))),
        sharding=tuple(draw(st.lists(_shardings(blocks), max_size=2))),
        sequence_parallel=draw(st.booleans()),
        zero=zero,
        hybrid=draw(st.none() | divisors(mesh.dp)) if zero else None,
        recompute=rules,
        offload=draw(_offloads(blocks, rules)),
        schedule=schedule,
        virtual=virtual,
        microbatch=microbatch,
        num_microbatches=num_microbatches,
        global_batch=microbatch * num_microbatches * mesh.dp,
        precision=draw(st.sampled_from(["fp64", "fp32", "bf16", "fp16"])),
        compile=draw(st.booleans()),
    )


@st.composite
def _offloads(draw: st.DrawFn, blocks: list[str], rules: tuple[Recompute, ...]) -> Offload:
    """Activations of blocks that are not recomputed may go to the host."""
    redone = {name for rule in rules for name in expand_names(rule.blocks)}
    free = [name for name in blocks if name not in redone]
    names = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    return msgspec.structs.replace(draw(values(Offload)), activations=tuple(names))


@st.composite
def _stages(draw: st.DrawFn, blocks: list[str], pp: int, virtual: int, placement: Placement) -> tuple[Stage, ...]:
    num_stages = pp * virtual
    cuts = sorted(draw(st.lists(st.integers(0, len(blocks)), min_size=num_stages - 1, max_size=num_stages - 1)))
    pieces = [blocks[start:end] for start, end in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]
    return tuple(
        Stage(coordinate=coordinate_of(number, pp, placement), blocks=compact_names(piece))
        for number, piece in enumerate(pieces)
    )


@st.composite
def _recompute_rules(draw: st.DrawFn, blocks: list[str]) -> tuple[Recompute, ...]:
    modes = draw(st.lists(st.sampled_from([None, "full", "selective"]), min_size=len(blocks), max_size=len(blocks)))
    chosen = {
        mode: [block for block, own in zip(blocks, modes, strict=True) if own == mode] for mode in ("full", "selective")
    }
    return tuple(Recompute(mode=mode, blocks=compact_names(named)) for mode, named in chosen.items() if named)


@st.composite
def _shardings(draw: st.DrawFn, blocks: list[str]) -> BlockSharding:
    dims = st.lists(st.sampled_from(["", "tp"]), max_size=3).map(tuple)
    tensors = tuple(draw(st.lists(st.builds(TensorSharding, tensor=words, dims=dims, reason=words), max_size=2)))
    if draw(st.booleans()):
        return BlockSharding(for_kind=draw(words), tensors=tensors)
    return BlockSharding(for_blocks=(draw(st.sampled_from(blocks)),), tensors=tensors)


def hand_plan(**changes: Any) -> Plan:
    """Eight blocks on two stages of two data-parallel ranks."""
    fields: dict[str, Any] = {
        "model": "gpt:layers=8",
        "graph": "1f2e3d",
        "cluster": "local",
        "mesh": Mesh(pp=2, dp=2),
        "stages": (Stage(coordinate=0, blocks=("blocks.0-3",)), Stage(coordinate=1, blocks=("blocks.4-7", "head"))),
        "microbatch": 2,
        "num_microbatches": 4,
        "global_batch": 16,
    }
    return Plan(**{**fields, **changes})


def hand_graph() -> Graph:
    """An embedding, four like blocks, and a head that is tied to the embedding."""
    matmul = Op(
        name="mm",
        kind="matmul",
        phase="forward",
        count=2,
        flops=Affine(10.0, 100.0),
        read_bytes=Affine(0.0, 8.0),
        written_bytes=Affine(0.0, 4.0),
    )
    return Graph(
        model="gpt:layers=4",
        parameters=(
            Parameter(name="embed.weight", shape=(50, 8), dtype="float32", block="embed"),
            *(
                Parameter(name=f"blocks.{i}.weight", shape=(8, 8), dtype="float32", block=f"blocks.{i}")
                for i in range(4)
            ),
            Parameter(name="head.weight", shape=(50, 8), dtype="float32", tied_to="embed.weight", block="head"),
        ),
        kinds=(
            Kind(name="outside", ops=()),
            Kind(name="Block", ops=(matmul,)),
            Kind(name="Head", ops=(matmul, matmul)),
        ),
        blocks=(
            Block(name="", kind="outside", repeated=False),
            Block(name="embed", kind="outside", repeated=False),
            *(Block(name=f"blocks.{i}", kind="Block", repeated=True) for i in range(4)),
            Block(name="head", kind="Head", repeated=False),
        ),
        timeline=(),
        buffer_bytes=0,
        batch_bytes=Affine(0.0, 64.0),
        tokens_per_sample=16,
    )
