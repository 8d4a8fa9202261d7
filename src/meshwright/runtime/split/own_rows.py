"""Experts under the Splitter: each row is worked on by itself, so a rank that holds some of the rows runs the experts on those.

Which rows an expert gets depends on values, and no rule could say how such a result lies. The rows are therefore handed over as
an ordinary tensor of this rank's own, and what the experts make of them is laid like the rows were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.runtime._torch import DisableTorchFunction
from meshwright.runtime.split.laying import laid
from meshwright.runtime.split.layout import Cut, lay, layout_of
from meshwright.runtime.split.splitter import Splitter

ROWS = 0
"""The dim along which tokens lie."""


def run_on_own_rows(module: nn.Module, names: Iterable[str], split: Splitter) -> None:
    """names: the modules of experts."""
    for name in names:
        part = module.get_submodule(name)
        part.forward = _on_own_rows(part, part.forward, split)


def _on_own_rows(part: nn.Module, forward: Callable[..., Tensor], split: Splitter) -> Callable[..., Tensor]:
    @wraps(forward)
    def run(rows: Tensor, chosen: Tensor, weights: Tensor, *others: Any, **options: Any) -> Tensor:
        given = [split.summed(tensor) for tensor in (rows, chosen, weights)]
        cuts = _cuts_of_rows(given[0])
        if not cuts:
            return forward(*given, *others, **options)
        given = [given[0], *(_as_rows(split, tensor, cuts) for tensor in given[1:])]
        for axis in cuts:
            for parameter in part.parameters():
                split.lend(parameter, axis)
        made = forward(*map(_without_cuts, given), *others, **options)
        return lay(made, {**(layout_of(made) or {}), **cuts})

    return run


def _as_rows(split: Splitter, tensor: Tensor, cuts: dict[Axis, Cut]) -> Tensor:
    """Choices of the rows that this rank has; a router that ran on whole tensors made all of them on every rank."""
    if _cuts_of_rows(tensor) == cuts:
        return tensor
    with DisableTorchFunction():  # as inside a rule
        return laid(split, tensor, cuts)


def _cuts_of_rows(tensor: Tensor) -> dict[Axis, Cut]:
    """How the rows lie over ranks."""
    layout = layout_of(tensor) or {}
    return {axis: share for axis, share in layout.items() if isinstance(share, Cut) and share.dim == ROWS}


def _without_cuts(tensor: Tensor) -> Tensor:
    """This rank's rows as a tensor of their own, with what else is noted of it."""
    cuts, layout = _cuts_of_rows(tensor), layout_of(tensor) or {}
    with DisableTorchFunction():
        own = tensor.view_as(tensor)
    return lay(own, {axis: share for axis, share in layout.items() if axis not in cuts})
