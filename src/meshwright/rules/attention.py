"""The ops of a forward that form an attention core. Capture marks a graph by it, and selective recompute runs by it.

From the ops that mix positions (a fused attention, or a softmax between two products of activations), to both sides along
the edges, as long as an op runs in the same module and reads no parameter. So the projections end it, and rotary positions,
scaling, mask, softmax, dropout and the product with the values are in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from meshwright.rules.kinds import reached

FUSED_ATTENTION = "_scaled_dot_product"
SOFTMAXES = ("_softmax", "_safe_softmax")


class Step(Protocol):
    """An op as far as this rule looks at it. `inputs`: numbers of the ops that wrote what it reads, or names."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def block(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def inputs(self) -> tuple[int | str, ...]: ...


def reading_parameters(ops: Sequence[Step]) -> set[int]:
    """Ops with a parameter among their inputs, also one that was only cast or copied before."""
    found, copies = set(), set()
    for number, op in enumerate(ops):
        from_parameters = [(isinstance(s, str) and not s.startswith("@")) or s in copies for s in op.inputs]
        if any(from_parameters):
            found.add(number)
        if from_parameters and all(from_parameters) and op.kind == "copy":
            copies.add(number)
    return found


def attention_core(ops: Sequence[Step], outside: set[int]) -> set[int]:
    """Numbers of the forward ops of the core. `outside`: ops that cannot be in it, such as ops that read parameters."""
    inside = {number for number, op in enumerate(ops) if op.phase == "forward" and number not in outside}
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for number in inside:
        for source in ops[number].inputs:
            if isinstance(source, int) and source in inside and _module(ops[source]) == _module(ops[number]):
                before[number].append(source)
                after[source].append(number)
    found = set()
    for number in inside:
        op = ops[number]
        if op.kind == "attention":
            found |= reached([number], before.__getitem__) | reached([number], after.__getitem__)
        elif op.name in SOFTMAXES:
            upstream, downstream = reached([number], before.__getitem__), reached([number], after.__getitem__)
            if all(any(ops[other].kind == "matmul" for other in side) for side in (upstream, downstream)):
                products = [other for other in downstream if ops[other].kind == "matmul"]
                found |= reached(products, before.__getitem__) | downstream
    return found


def _module(op: Step) -> tuple[str, str]:
    return op.block, op.module
