"""A Flow: what the blocks of a model hand each other in one forward and its loss, seen from outside the blocks.

Events come in the order of the program. Each reads and makes tensors, by number. An event is a call of a block, a call of a torch
function outside all blocks, the objective, or a parameter that is read outside its block. Tensors made from the batch alone are not
among them: every stage makes them itself.
"""

from __future__ import annotations

import msgspec

from meshwright.core.codec import Value


class Affine(msgspec.Struct, frozen=True, array_like=True):
    """`fixed + per_sample · num_samples`, written as two numbers."""

    fixed: float
    per_sample: float

    def at(self, num_samples: float) -> float:
        return self.fixed + self.per_sample * num_samples


NOTHING = Affine(0.0, 0.0)


OUTSIDE = ""
OBJECTIVE = "@objective"


class FlowTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that passes between blocks."""

    num_bytes: Affine = NOTHING
    needs_gradient: bool = False


class FlowEvent(msgspec.Struct, frozen=True, array_like=True):
    """Reads and makes tensors by their number."""

    block: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]


class Flow(Value, kw_only=True):
    """Events that read nothing and are outside all blocks are parameters of no block."""

    tensors: tuple[FlowTensor, ...] = ()
    events: tuple[FlowEvent, ...] = ()
