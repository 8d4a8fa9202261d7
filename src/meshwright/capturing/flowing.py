"""What the blocks of a module hand each other, with 2 and with 3 samples → the Flow of its Graph."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from meshwright.capturing.assemble import affine
from meshwright.capturing.stand_ins import Arithmetic, fake_batch
from meshwright.capturing.surroundings import quiet_surroundings
from meshwright.core.flow import Flow, FlowTensor
from meshwright.models.objective import Batch, Objective, map_batch, tensors_of
from meshwright.models.sketch import Sketch


def find_flow(
    module: nn.Module, few: Batch, more: Batch, objective: Objective, blocks: dict[str, bool], arithmetic: Arithmetic
) -> Flow | None:
    """None where the code between the blocks asks for values, or does other work for other batch sizes: such a module can be
    planned without stages."""
    for values in (False, True):
        flows = _follow(module, (few, more), objective, blocks, arithmetic, values)
        if flows is not None and flows[0].events == flows[1].events:
            return _joined(*flows)
    return None


def _follow(
    module: nn.Module,
    batches: tuple[Batch, Batch],
    objective: Objective,
    blocks: dict[str, bool],
    arithmetic: Arithmetic,
    values: bool,
) -> tuple[Flow, Flow] | None:
    """values: of the batch's whole numbers, for code between the blocks that asks for them; what comes of them takes memory."""
    try:
        sketch = Sketch(module, blocks, arithmetic.stored, torch.device("cpu"), arithmetic.computing, known={})
        with quiet_surroundings(sketch.module):
            found = []
            for batch in batches:
                with sketch.fakes:
                    faked = fake_batch(batch, arithmetic)
                with nullcontext() if values else sketch.fakes:
                    found.append(sketch.follow(_with_values(batch, faked) if values else faked, objective).flow)
    except Exception:  # whatever the user's code does on tensors without values
        return None
    return found[0], found[1]


def _with_values(batch: Batch, faked: Batch) -> Batch:
    kept = iter(
        [
            real if not real.is_floating_point() else fake
            for real, fake in zip(tensors_of(batch), tensors_of(faked), strict=True)
        ]
    )
    return map_batch(lambda _: next(kept), batch)


def _joined(one: Flow, other: Flow) -> Flow:
    pairs = zip(one.tensors, other.tensors, strict=True)
    return Flow(
        tensors=tuple(FlowTensor(affine(a.num_bytes.fixed, b.num_bytes.fixed), a.needs_gradient) for a, b in pairs),
        events=one.events,
    )
