"""The rule for dropout: ranks draw alike for what they all have, and each for itself for its own part.

All ranks of a tp or cp group keep the same random state, so that whole tensors are dropped alike. For a part, the state is
turned aside for the draw, by an amount that is this rank's own, and put back as if the draw had not happened but once.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.runtime.split.arguments import Args, Options
from meshwright.runtime.split.layout import cuts, lay, layout_of
from meshwright.runtime.split.splitter import Splitter

APART = 1_000_003
"""How far the seeds of two ranks lie apart."""


def dropout(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor = split.summed(args[0])
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    layout = layout_of(tensor)
    if not training or not probability:
        return lay(function(tensor, *args[1:], **kwargs), layout)
    number = 0
    for axis in cuts(layout):
        number = number * split.degrees[axis] + split.axes[axis].rank
    with torch.random.fork_rng(devices=[tensor.device] if tensor.is_cuda else []):
        seed = int(torch.randint(2**62, ()))
        torch.manual_seed(seed + APART * number)
        made = function(tensor, *args[1:], **kwargs)
    torch.rand(())  # the common state moves on
    return lay(made, layout)
