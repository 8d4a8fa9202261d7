"""Rules for random functions: ranks draw alike for what they all have, and each for itself for its own part.

All ranks of a tp or cp group keep the same random state, so that whole tensors are drawn alike. For a part, the state is turned
aside for the draw, by an amount that is this rank's own, and put back as if the draw had not happened but once. Recompute puts
the common state back before it runs a block again, and so draws the same for every part.

Where numbers are drawn by sample (runtime/draws), ranks need no state: each draws the whole and takes its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.runtime.draws.mode import Part, active_draws
from meshwright.runtime.split.aliases import sum_in_place
from meshwright.runtime.split.layout import Cut, Layout, cuts, lay, layout_of, whole_shape
from meshwright.runtime.split.rules.arguments import Args, Options, changes_its_input
from meshwright.runtime.split.rules.pointwise import pointwise
from meshwright.runtime.split.rules.whole import become, in_place_on_whole, relaid
from meshwright.runtime.split.splitter import Splitter

APART = 1_000_003
"""How far the seeds of two ranks lie apart."""
UNBATCHED = {"dropout1d": 2, "dropout3d": 4}
"""Dims of a sample without a batch dim. dropout2d takes three dims for samples, channels and places."""


@contextmanager
def apart(split: Splitter, tensor: Tensor, layout: Layout | None) -> Iterator[None]:
    """While this lasts, what is drawn is this rank's own, where the tensor lies over ranks."""
    if not cuts(layout):
        yield
        return
    draws = active_draws()
    if draws is not None:
        with draws.on_part(_part(split, cuts(layout))):
            yield
        return
    number = 0
    for axis in sorted(cuts(layout)):
        number = number * split.degrees[axis] + split.axes[axis].rank
    with torch.random.fork_rng(devices=[tensor.device] if tensor.is_cuda else []):
        seed = int(torch.randint(2**62, ()))
        torch.manual_seed(seed + APART * number)
        yield
    torch.rand(())  # the common state moves on


def _part(split: Splitter, cut_along: dict[Axis, Cut]) -> Part:
    """What this rank holds of a tensor that is drawn as a whole, where numbers are drawn by sample."""

    def own(whole: Tensor) -> Tensor:
        for axis, cut in cut_along.items():
            whole = split.axes[axis].own_part(whole, cut)
        return whole

    return Part(whole=lambda size: whole_shape(size, dict(cut_along), split.axes), own=own)


def dropout(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """dropout and alpha_dropout: element by element."""
    tensor = split.summed(args[0])
    if tensor is not args[0] and changes_its_input(function, args, kwargs):
        return in_place_on_whole(split, function, args, kwargs)
    layout = layout_of(tensor)
    with apart(split, tensor, layout):
        return lay(function(tensor, *args[1:], **kwargs), layout)


def dropout_of_channels(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """dropout1d, dropout2d, dropout3d, feature_alpha_dropout: a channel is dropped as a whole, so that it must be there."""
    tensor = args[0]
    first = 1 if tensor.dim() == UNBATCHED.get(function.__name__, 0) else 2
    gathered = split.gather_dims(split.summed(tensor), range(first, tensor.dim()))
    if gathered is not tensor and changes_its_input(function, args, kwargs):
        return in_place_on_whole(split, function, args, kwargs)
    return dropout(split, function, (gathered, *args[1:]), kwargs)


def drawn_by_values(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """bernoulli, normal, poisson, rrelu: element by element, by the values of their tensors."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    with apart(split, tensors[0], {axis: cut for tensor in tensors for axis, cut in cuts(layout_of(tensor)).items()}):
        return pointwise(split, function, args, kwargs)


def drawn_alike(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """rand_like, randn_like, randint_like: as large as their tensor."""
    layout: Layout = dict(cuts(layout_of(args[0])))
    with apart(split, args[0], layout):
        return lay(function(*args, **kwargs), layout)


def filled(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """normal_, uniform_, exponential_, …: a tensor is filled, whatever it held."""
    target = args[0]
    if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return _filled_by_values(split, function, args, kwargs)
    sum_in_place(split, target)
    layout: Layout = dict(cuts(layout_of(target)))
    with apart(split, target, layout):
        return relaid(function(*args, **kwargs), layout)


def _filled_by_values(split: Splitter, function: Any, args: Args, kwargs: Options) -> Tensor:
    """bernoulli_(probabilities)"""
    whole = args[0].new_empty(split.shape(args[0]))
    others = [split.whole(v) if isinstance(v, Tensor) else v for v in args[1:]]
    return become(split, args[0], function(whole, *others, **kwargs))
