"""A model with only the first of its repeated blocks: small enough to compare where the whole one would take too long."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from meshwright.models.source import ModelSource

BLOCKS = 4
"""Of a list of alike ones: enough for two stages with two parts each, and for kinds that take turns."""


def shortened(source: ModelSource) -> ModelSource:
    """Runs only where the model goes through its list of blocks, and has no number of blocks of its own."""
    return replace(source, name=f"{source.name} ({BLOCKS} blocks)", build=lambda: shorten(source.build()))


def shorten(module: nn.Module) -> nn.Module:
    """In place."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) > BLOCKS and len({type(one) for one in part}) <= 2:
            for key in list(part._modules)[BLOCKS:]:
                del part._modules[key]
    return module
