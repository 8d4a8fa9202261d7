"""Backward makes gradients one by one: the share of them that is made when each op begins."""

from __future__ import annotations

from meshwright.core.graph import Affine, Kind, MemoryEvent, Op, Pass
from meshwright.cost.memory.footprint import GradientLiveness

GRADIENT, TOKENS = Affine(100.0, 0.0), Affine(0.0, 7.0)


def op(written: Affine) -> Op:
    return Op(name="mm", kind="matmul", phase="backward", written_bytes=written)


def backward(*written: Affine, told: tuple[int, ...] = ()) -> GradientLiveness:
    events = tuple(MemoryEvent(number, written[number]) for number in told)
    one = Pass(phase="backward", num_ops=len(written), events=events)
    return GradientLiveness(Kind(name="Block", ops=tuple(map(op, written)), passes=(one,)), one)


def test_the_share_grows_with_each_gradient() -> None:
    liveness = backward(TOKENS, GRADIENT, TOKENS, Affine(300.0, 0.0), told=(0, 2))
    assert liveness.total_bytes == 400
    assert [liveness.share_made_before(number) for number in range(5)] == [0, 0, 0.25, 0.25, 1]


def test_what_memory_events_tell_of_is_no_gradient() -> None:
    assert backward(GRADIENT, GRADIENT, told=(0,)).total_bytes == 100


def test_a_pass_without_gradients_has_them_all() -> None:
    assert backward(TOKENS, told=(0,)).share_made_before(0) == 1


def test_forward_makes_none() -> None:
    one = Pass(phase="forward", num_ops=1)
    assert GradientLiveness(Kind(name="Block", ops=(op(GRADIENT),), passes=(one,)), one).total_bytes == 0
