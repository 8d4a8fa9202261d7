"""How inputs of a sample may lie over ranks: all simple ways, or ways drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from split_runs import Ways, World
from split_samples import Sample
from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.runtime.split.layout import Addend, Cut, Layout, Share

Choose = Callable[[Sequence[Any]], Any]


def _tensors(sample: Sample) -> dict[int, Tensor]:
    return {n: value for n, value in enumerate(sample.inputs) if isinstance(value, Tensor) and value.dim()}


def _may_be_summands(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)


def simple_ways(sample: Sample, world: World) -> Iterator[Ways]:
    """Of a world with one axis: each input cut along each dim, in one run and in two; two inputs cut; each as summands."""
    axis, tensors = world.axes[0], _tensors(sample)
    cuts = {
        n: [c for dim, size in enumerate(t.shape) for runs in (1, 2) if (c := world.cut(dim, size, runs, axis)) is not None]
        for n, t in tensors.items()
    }  # fmt: skip
    if sample.brief:
        yield from ({n: {axis: found[0]}} for n, found in cuts.items() if found)
        return
    for n, found in cuts.items():
        yield from ({n: {axis: cut}} for cut in found)
    for one, other in pairwise(sorted(cuts)):
        yield from ({one: {axis: cut}, other: {axis: also}} for cut in cuts[one] for also in cuts[other])
    numbers = sorted(cuts)
    if len(numbers) > 2 and len({tensors[n].shape for n in numbers[:3]}) == 1:
        yield from ({n: {axis: cut} for n in numbers[:3]} for cut in cuts[numbers[0]])
    for n in numbers:
        if _may_be_summands(tensors[n]):
            yield {n: {axis: Addend()}}
            yield {n: {axis: Addend(torch.ones(()))}}


def drawn_ways(sample: Sample, world: World, choose: Choose) -> Ways:
    found: Ways = {}
    for n, tensor in _tensors(sample).items():
        layout: Layout = {}
        order = choose([world.axes, world.axes[::-1]]) if len(world.axes) > 1 else world.axes
        for axis in order:
            share = _drawn_share(tensor, layout, world, axis, choose)
            if share is not None:
                layout[axis] = share
        if layout:
            found[n] = layout
    return found


def _drawn_share(tensor: Tensor, before: Layout, world: World, axis: Axis, choose: Choose) -> Share | None:
    sizes, taken = list(tensor.shape), {share.dim for share in before.values() if isinstance(share, Cut)}
    for other, share in before.items():
        if isinstance(share, Cut):  # of parts that differ, none is cut further
            sizes[share.dim] = 0 if share.rest else sizes[share.dim] // dict(world.degrees)[other]
    found = [world.cut(dim, size, runs, axis) for dim, size in enumerate(sizes) for runs in (1, 2, 4)]
    cuts = [cut for cut in found if cut is not None and not (cut.rest and cut.dim in taken)]
    sums = [Addend(), Addend(torch.ones(()))] if _may_be_summands(tensor) else []
    drawn: Share | None = choose([None, None, *cuts, *sums])
    last = tensor.dim() - 1
    if isinstance(drawn, Addend) and any(isinstance(s, Cut) and s.dim == last for s in before.values()):
        return Addend()
    with_bias = [other for other, s in before.items() if isinstance(s, Addend) and s.bias is not None]
    if with_bias and isinstance(drawn, Addend):
        before[with_bias[0]] = Addend()
    return None if with_bias and isinstance(drawn, Cut) and drawn.dim == last else drawn
