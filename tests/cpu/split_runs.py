"""One sample of a torch function, run whole and run on parts: values, sizes and gradients side by side.

A cut input is this rank's part, a summed one a summand. Along tp every rank computes the whole loss; along cp each has a share
of it, and gradients of whole inputs are summands (runtime/split/exchange.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from split_samples import RANDOM, Sample
from torch import Tensor, nn

from meshwright.core.collective import Axis
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Addend, Cut, Layout, lay
from meshwright.runtime.split.splitter import NotSplit, Splitter

TOLERANCE = 1e-10
Ways = dict[int, Layout]
"""Number of an input → how it lies; the others are whole."""


@dataclass
class Finding:
    """What came of a group of samples on one rank."""

    wrong: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)
    """Name of a sample → in how many ways it ran right."""


@dataclass
class Outcome:
    values: list[Tensor]
    sizes: list[tuple[int, ...]]
    gradients: list[Tensor | None]


def check_samples(samples: Iterator[Sample], axis: Axis) -> Finding:
    ranks = Ranks(axis, dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    finding = Finding()
    for sample in samples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = run(sample, sample.inputs)
            finding.right.setdefault(sample.name, 0)
            for ways in ways_of(sample, ranks):
                _check(sample, expected, ways, ranks, finding)
    return finding


def _check(sample: Sample, expected: Outcome, ways: Ways, ranks: Ranks, finding: Finding) -> None:
    what = f"{sample} with {ways} over {ranks.axis}"
    try:
        found = run_split(sample, ways, ranks)
    except NotSplit as error:
        finding.refused[what] = error.words
        return
    except Exception as error:
        finding.wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        return
    difference = compare(expected, found, sample)
    if difference:
        finding.wrong.append(f"{what}: {difference}")
    else:
        finding.right[sample.name] += 1


def ways_of(sample: Sample, ranks: Ranks) -> Iterator[Ways]:
    """Each input cut along each dim that divides, in one run and in two; two inputs cut; the first one as summands."""
    tensors = {n: value for n, value in enumerate(sample.inputs) if isinstance(value, Tensor) and value.dim()}
    single: dict[int, list[Cut]] = {
        n: [Cut(dim, runs) for dim, size in enumerate(t.shape) for runs in (1, 2) if size % (ranks.size * runs) == 0]
        for n, t in tensors.items()
    }
    if sample.brief:
        yield from ({n: {ranks.axis: found[0]}} for n, found in single.items() if found)
        return
    for n, found in single.items():
        yield from ({n: {ranks.axis: cut}} for cut in found)
    numbers = sorted(single)
    for one, other in pairwise(numbers):
        for cut in single[one]:
            yield from (
                {one: {ranks.axis: cut}, other: {ranks.axis: also}} for also in single[other] if also.runs == cut.runs
            )
    if len(numbers) > 2:
        shapes = {tensors[n].shape for n in numbers[:3]}
        yield from ({n: {ranks.axis: cut} for n in numbers[:3]} for cut in single[numbers[0]] if len(shapes) == 1)
    for n in numbers:
        if tensors[n].is_floating_point() and not isinstance(tensors[n], nn.Parameter):
            yield {n: {ranks.axis: Addend()}}
            yield {n: {ranks.axis: Addend(torch.ones(()))}}


# ---------------------------------------------------------------- runs


def run(sample: Sample, inputs: tuple[Any, ...]) -> Outcome:
    own = [_leaf(value) for value in inputs]
    made = _tensors(sample.call(*own))
    _backward(made, 1)
    return Outcome([m.detach() for m in made], [tuple(m.shape) for m in made], _gradients(own))


def run_split(sample: Sample, ways: Ways, ranks: Ranks) -> Outcome:
    splitter = Splitter([ranks])
    own = []
    for n, value in enumerate(sample.inputs):
        part = _laid(value, ways.get(n, {}), ranks)
        if isinstance(part, nn.Parameter):
            splitter.names[id(part)] = str(n)
        own.append(part)
    with splitter:
        made = _tensors(sample.call(*own))
        sizes = [tuple(m.shape) for m in made]
    whole = [splitter.gather_dims(splitter.summed(m), range(m.dim())) for m in made]
    along_cp = ranks.axis == "cp"
    _backward(whole, ranks.size if along_cp else 1)
    gradients = _gradients(own)
    for n, gradient in enumerate(gradients):
        if gradient is None:
            continue
        share = ways.get(n, {}).get(ranks.axis)
        if isinstance(share, Cut):
            gradients[n] = ranks.gather(gradient, share)
        elif share is None and (along_cp or str(n) in splitter.owed):
            gradients[n] = ranks.add_up(gradient)
    return Outcome([w.detach() for w in whole], sizes, gradients)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    if isinstance(value, nn.Parameter):
        return nn.Parameter(copied)
    return copied.requires_grad_(value.requires_grad)


def _laid(value: Any, layout: Layout, ranks: Ranks) -> Any:
    if not layout:
        return _leaf(value)
    share = layout[ranks.axis]
    whole = value.detach()
    if isinstance(share, Cut):
        part = ranks.own_part(whole, share).clone()
    else:
        # summands that add up to the whole, or to the whole less the bias
        part = (whole - (0.0 if share.bias is None else 1.0)) / ranks.size + (ranks.rank - (ranks.size - 1) / 2)
    made = nn.Parameter(part) if isinstance(value, nn.Parameter) else part.requires_grad_(value.requires_grad)
    if isinstance(share, Addend) and share.bias is not None:
        share = Addend(torch.ones(whole.shape[-1], dtype=whole.dtype))
    return lay(made, {ranks.axis: share})


def _tensors(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [item for item in made if isinstance(item, Tensor)]


def _backward(made: list[Tensor], shares: int) -> None:
    losses = [(m * _factors(m)).sum() for m in made if m.is_floating_point() and m.requires_grad]
    if losses:
        (torch.stack([loss.double() for loss in losses]).sum() / shares).backward()


def _factors(made: Tensor) -> Tensor:
    drawn = torch.rand(made.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    return drawn.to(made.dtype)


def _gradients(inputs: list[Any]) -> list[Tensor | None]:
    """Of inputs that have none, zeros: a rank may have had no use for its part."""
    return [
        (torch.zeros_like(value) if value.grad is None else value.grad)
        if isinstance(value, Tensor) and value.requires_grad
        else None
        for value in inputs
    ]


def compare(expected: Outcome, found: Outcome, sample: Sample) -> str:
    """In words; empty when all is the same."""
    if expected.sizes != found.sizes:
        return f"the model sees sizes {found.sizes}, which are {expected.sizes}"
    if sample.name.partition("/")[0] in RANDOM:
        return ""
    for one, other in zip(expected.values, found.values, strict=True):
        if one.dtype != other.dtype or not _same(one, other):
            return f"values differ: {one.flatten()[:6].tolist()} {other.flatten()[:6].tolist()}"
    for n, (one_gradient, other_gradient) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        if one_gradient is not None and (other_gradient is None or not _same(one_gradient, other_gradient)):
            shown = None if other_gradient is None else other_gradient.flatten()[:6].tolist()
            return f"gradients of input {n} differ: {one_gradient.flatten()[:6].tolist()} {shown}"
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(
        one.double(),
        other.double(),
        rtol=TOLERANCE if one.dtype == torch.float64 else 1e-3,
        atol=TOLERANCE,
        equal_nan=True,
    )
