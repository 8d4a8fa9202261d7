"""What the blocks of a module hand each other, with 2 and with 3 samples → the Flow of its Graph."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.capture.assemble import affine
from meshwright.capture.stand_ins import Arithmetic, fake_batch
from meshwright.capture.surroundings import quiet_surroundings
from meshwright.core.flow import Flow, FlowTensor
from meshwright.models.objective import Batch, Objective
from meshwright.models.sketch import Sketch


def find_flow(
    module: nn.Module, few: Batch, more: Batch, objective: Objective, blocks: dict[str, bool], arithmetic: Arithmetic
) -> Flow | None:
    """None where the code between the blocks asks for values, or does other work for other batch sizes: such a module can be
    planned without stages."""
    try:
        sketch = Sketch(module, blocks, arithmetic.stored, torch.device("cpu"), arithmetic.computing, known={})
        with quiet_surroundings(sketch.module), sketch.fakes:
            one, other = (sketch.follow(fake_batch(batch, arithmetic), objective).flow for batch in (few, more))
    except Exception:  # whatever the user's code does on tensors without values
        return None
    if one.events != other.events:
        return None
    pairs = zip(one.tensors, other.tensors, strict=True)
    return Flow(
        tensors=tuple(FlowTensor(affine(a.num_bytes.fixed, b.num_bytes.fixed), a.needs_gradient) for a, b in pairs),
        events=one.events,
    )
