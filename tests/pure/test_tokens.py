"""Where cp finds tokens that no model looks up: runs of blocks that attend over all they are called with, or a refusal by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from meshwright.core.errors import PlanError
from meshwright.core.flow import OBJECTIVE, Affine, Flow, FlowEvent, FlowTensor
from meshwright.core.graph import Block, Graph, Kind, Op, Segment, Shape
from meshwright.core.plan import Mesh, Plan, Stage
from meshwright.cost.degrees import Degrees, check_degrees
from meshwright.cost.local_block import make_local_blocks
from meshwright.rules.tokens import looked_up_tokens, output_tensors, token_names, tokens_in_blocks

TOKENS, WIDTH, HEADS, DEPTH = 16, 32, 4, 4
SAMPLES = Affine(0.0, 1.0)


def shape(*sizes: float) -> Shape:
    return (SAMPLES, *(Affine(float(size), 0.0) for size in sizes))


def op(name: str, kind: str, read: Shape, made: Shape, source: Any = 0, **more: Any) -> Op:
    size = made[0].per_sample * 4.0
    for dim in made[1:]:
        size *= dim.fixed
    return Op(
        name=name, kind=kind, phase="forward", inputs=(source,), input_shapes=(read,), result_shape=made,
        written_bytes=Affine(0.0, size), **more,
    )  # type: ignore[arg-type]  # fmt: skip


def attention(tokens: int, keys: int) -> Op:
    split, other = shape(HEADS, tokens, WIDTH // HEADS), shape(HEADS, keys, WIDTH // HEADS)
    return Op(
        name="attention", kind="attention", phase="forward", region="attention", inputs=(0, 0, 0),
        input_shapes=(split, other, other), result_shape=split,
    )  # fmt: skip


def block_kind(
    *, tokens: int = TOKENS, keys: int = TOKENS, stream: Shape | None = None, more: tuple[Op, ...] = ()
) -> Kind:
    stream = stream or shape(TOKENS, WIDTH)
    ops = (
        op("native_layer_norm", "normalisation", stream, stream, "@input"),
        attention(tokens, keys),
        *more,
        op("add", "elementwise", stream, stream, 1),
        msgspec.structs.replace(op("add", "elementwise", stream, stream, 1), phase="backward"),
    )
    return Kind(name="layer", ops=ops)


def chain(*, read_early: int | None = None, called: tuple[int, ...] | None = None) -> Flow:
    """Patches, blocks, a head that reads the last block's result; read_early: and that of another."""
    order = called if called is not None else tuple(range(DEPTH))
    events = [FlowEvent("patches", (), (0,))]
    events += [FlowEvent(f"layers.{n}", (place,), (place + 1,)) for place, n in enumerate(order)]
    reads = (len(order), *([] if read_early is None else [read_early + 1]))
    events += [FlowEvent("", reads, (len(order) + 1,)), FlowEvent(OBJECTIVE, (len(order) + 1,), ())]
    size = FlowTensor(Affine(0.0, 4.0 * TOKENS * WIDTH), True)
    return Flow(tensors=(size,) * (len(order) + 2), events=tuple(events))


def graph(kind: Kind, flow: Flow | None) -> Graph:
    names = [f"layers.{n}" for n in range(DEPTH)]
    rest = Kind(name="rest", ops=(op("sum", "reduction", shape(TOKENS, WIDTH), shape(WIDTH), "@input"),))
    blocks = [Block(name="patches", kind="rest", repeated=False)]
    blocks += [Block(name=name, kind="layer", repeated=True) for name in names]
    return Graph(
        model="patches", parameters=(), kinds=(kind, rest), blocks=(*blocks, Block(name="", kind="rest", repeated=False)),
        timeline=(Segment("patches", 0),), buffer_bytes=0, batch_bytes=SAMPLES, tokens_per_sample=1, flow=flow,
    )  # fmt: skip


def plan(cp: int = 2, **more: Any) -> Plan:
    stage = Stage(coordinate=0, blocks=("patches", "layers.0-3"))
    return Plan(mesh=Mesh(cp=cp), stages=(stage,), microbatch=2, num_microbatches=1, global_batch=2, **more)


def test_blocks_that_hand_each_other_their_tokens_are_one_run() -> None:
    found = graph(block_kind(), chain())
    assert looked_up_tokens(found) == 0
    assert token_names(found, 2) == ("layers.0-3",)
    assert token_names(found, 1) == ()


def test_a_block_whose_result_is_read_elsewhere_ends_a_run() -> None:
    assert token_names(graph(block_kind(), chain(read_early=1)), 2) == ("layers.0-1", "layers.2-3")


def test_without_a_flow_the_blocks_of_a_list_are_a_run() -> None:
    """A model that leaves out layers at random."""
    assert token_names(graph(block_kind(), None), 2) == ("layers.0-3",)
    assert token_names(graph(block_kind(), chain(called=(0, 2, 3))), 2) == ("layers.0-3",)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (block_kind(tokens=4, keys=4), "attends over 4 tokens"),
        (block_kind(keys=4), "attends over 4 and 16 tokens"),
        (block_kind(stream=shape(WIDTH, 4, 4)), "not called with one tensor [samples, tokens, width]"),
        (
            block_kind(more=(op("convolution", "convolution", shape(TOKENS, WIDTH), shape(TOKENS, WIDTH)),)),
            "convolution",
        ),
        (block_kind(more=(op("roll", "copy", shape(4, 4, WIDTH), shape(4, 4, WIDTH)),)), "in a grid"),
        (
            Kind(name="layer", ops=(op("mul", "elementwise", shape(4), shape(4)),)),
            "none of its repeated blocks attends",
        ),
    ],
)
def test_others_are_refused_with_the_reason(kind: Kind, reason: str) -> None:
    found = graph(kind, chain())
    assert reason in tokens_in_blocks(found).refusal
    with pytest.raises(PlanError, match="looks up no tokens") as raised:
        check_degrees(found, plan())
    assert reason in str(raised.value)


def test_a_block_that_is_called_twice_is_refused() -> None:
    assert "called 2 times" in tokens_in_blocks(graph(block_kind(), chain(called=(0, 1, 2, 3, 0)))).refusal


def test_only_blocks_of_runs_have_parts() -> None:
    """The last of a run hands on whole tensors, all others parts."""
    found = graph(block_kind(), chain())
    local_blocks = make_local_blocks(found, plan())
    assert [local_blocks[name].degrees.cp for name in ("patches", "layers.0", "layers.3", "")] == [1, 2, 2, 1]
    assert [local_blocks[name].output_share for name in ("patches", "layers.0", "layers.3")] == [1, 0.5, 1]
    assert local_blocks["layers.3"].gathered == output_tensors(found.kinds[0]) != ()


def test_tokens_that_do_not_divide_are_counted_as_the_first_ranks_have_them() -> None:
    """Of 16 tokens over 3 ranks 6, 5 and 5; along cp all send 6."""
    every = [Degrees(cp=3, tokens=TOKENS, rank=rank) for rank in range(3)]
    assert [degrees.token_share for degrees in every] == [6 / 16, 5 / 16, 5 / 16]
    assert {degrees.sent_share for degrees in every} == {6 / 16}
    assert Degrees(cp=2, tokens=TOKENS).token_share == Degrees(cp=2, tokens=TOKENS).sent_share == 0.5


def test_token_blocks_name_blocks_of_a_stage() -> None:
    with pytest.raises(PlanError, match=r"token_blocks names block 'layers\.4'"):
        plan(token_blocks=("layers.0-4",))
