"""One sample of a torch function, run whole and run on parts: values, sizes and gradients side by side.

A cut input is this rank's part, a summed one a summand. Along tp every rank computes the whole loss; along cp each has a share
of it, and gradients of whole inputs are summands (runtime/split/exchange.py).
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from split_samples import Sample
from thread_ranks import on_every_rank
from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.core.plan import ContextWay
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Addend, Cut, Layout, lay
from meshwright.runtime.split.splitter import NotSplit, Splitter

TOLERANCE = 1e-10
EXACT = (torch.float64, torch.complex128)
Ways = dict[int, Layout]
"""Number of an input → how it lies; the others are whole."""


@dataclass(frozen=True)
class World:
    """Degrees of the axes, and how the plan uses them."""

    degrees: tuple[tuple[Axis, int], ...]
    sequence_parallel: bool = False
    context: ContextWay = "heads"

    @property
    def axes(self) -> list[Axis]:
        return [axis for axis, _ in self.degrees]

    def pieces(self, axis: Axis) -> int:
        return dict(self.degrees)[axis] * (2 if axis == "cp" and self.context == "ring" else 1)

    def cut(self, dim: int, size: int, runs: int, axis: Axis) -> Cut | None:
        """Of a dim of that size, where it can be cut so: along cp, ranks may have different numbers."""
        degree = dict(self.degrees)[axis]
        if not size or size % runs:
            return None
        if (size // runs) % self.pieces(axis) == 0:
            return Cut(dim, runs)
        differ = axis == "cp" and self.context == "heads" and size // runs > degree
        return Cut(dim, runs, size // runs % degree) if differ else None


WORLDS = {
    "tp": World((("tp", 2),)),
    "tp 4": World((("tp", 4),)),
    "sequence": World((("tp", 2),), sequence_parallel=True),
    "cp": World((("cp", 2),)),
    "ring": World((("cp", 2),), context="ring"),
    "cp 3": World((("cp", 3),)),
    "cp tp": World((("cp", 2), ("tp", 2))),
    "cp 3 tp": World((("cp", 3), ("tp", 2))),
}


@dataclass
class Outcome:
    values: list[Tensor]
    sizes: list[tuple[int, ...]]
    gradients: list[Tensor | None]


def difference(sample: Sample, ways: Ways, world: World) -> str | None:
    """In words; empty: everything is the same on all ranks. None: refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(sample)
        found = on_every_rank(
            dict(world.degrees), world.context == "ring", lambda axes: run_split(sample, ways, world, axes)
        )
    errors = [one for one in found if isinstance(one, Exception)]
    causes = [one for one in errors if not isinstance(one, threading.BrokenBarrierError)]
    if errors and all(isinstance(one, NotSplit) for one in errors):
        return None if len(errors) == len(found) else f"refused by some ranks only: {errors[0]}"
    if errors:
        cause = (causes or errors)[0]
        return f"{type(cause).__name__}: {str(cause)[:300]}"
    return next((words for one in found if (words := compare(expected, one, sample))), "")


# ---------------------------------------------------------------- runs


def run(sample: Sample) -> Outcome:
    own = [_leaf(value) for value in sample.inputs]
    made = _tensors(sample.call(*own))
    _backward(made, 1)
    return Outcome([m.detach() for m in made], [tuple(m.shape) for m in made], _gradients(own))


def run_split(sample: Sample, ways: Ways, world: World, axes: list[Ranks]) -> Outcome:
    splitter = Splitter(axes, world.sequence_parallel, world.context)
    own = []
    for n, value in enumerate(sample.inputs):
        part = _laid(value, ways.get(n, {}), splitter)
        if isinstance(part, nn.Parameter):
            splitter.names[id(part)] = str(n)
        own.append(part)
    with splitter:
        made = _tensors(sample.call(*own))
        sizes = [tuple(m.shape) for m in made]
    whole = [splitter.gather_dims(splitter.summed(m), range(m.dim())) for m in made]
    _backward(whole, splitter.degrees.get("cp", 1))
    gradients = [
        None if gradient is None else _whole_gradient(gradient, ways.get(n, {}), str(n) in splitter.owed, splitter)
        for n, gradient in enumerate(_gradients(own))
    ]
    return Outcome([w.detach() for w in whole], sizes, gradients)


def _whole_gradient(gradient: Tensor, layout: Layout, is_owed: bool, splitter: Splitter) -> Tensor:
    for axis, share in reversed(layout.items()):
        if isinstance(share, Cut):
            gradient = splitter.axes[axis].gather(gradient, share)
    for axis, ranks in splitter.axes.items():
        if axis not in layout and (axis == "cp" or is_owed):
            gradient = ranks.add_up(gradient)
    return gradient


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    if isinstance(value, nn.Parameter):
        return nn.Parameter(copied)
    return copied.requires_grad_(value.requires_grad)


def _laid(value: Any, layout: Layout, splitter: Splitter) -> Any:
    if not layout:
        return _leaf(value)
    part, noted = value.detach().clone(), dict(layout)
    for axis, share in layout.items():
        if isinstance(share, Addend) and share.bias is not None:
            noted[axis] = Addend(torch.ones(value.shape[-1], dtype=value.dtype))
            part = part - 1.0
    for axis, share in layout.items():  # summands that add up to the whole, or to the whole less the bias
        if isinstance(share, Addend):
            ranks = splitter.axes[axis]
            part = part / ranks.size + (ranks.rank - (ranks.size - 1) / 2)
    for axis, share in layout.items():
        if isinstance(share, Cut):
            part = splitter.axes[axis].own_part(part, share).clone()
    made = nn.Parameter(part) if isinstance(value, nn.Parameter) else part.requires_grad_(value.requires_grad)
    return lay(made, noted)


def _tensors(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [item for item in made if isinstance(item, Tensor)]


def _real(made: Tensor) -> Tensor:
    return torch.view_as_real(made.resolve_conj()) if made.is_complex() else made


def _backward(made: list[Tensor], shares: int) -> None:
    real = [_real(m) for m in made if (m.is_floating_point() or m.is_complex()) and m.requires_grad]
    losses = [(m * _factors(m)).sum() for m in real]
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
    if sample.random:
        return ""
    for one, other in zip(expected.values, found.values, strict=True):
        if one.dtype != other.dtype or not _same(one, other):
            return f"values differ: {one.flatten()[:6].tolist()} {other.flatten()[:6].tolist()}"
    narrow = any(value.dtype not in EXACT for value in expected.values)  # a third of a gradient is rounded on its way
    for n, (one_gradient, other_gradient) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        if one_gradient is not None and (other_gradient is None or not _same(one_gradient, other_gradient, narrow)):
            shown = None if other_gradient is None else other_gradient.flatten()[:6].tolist()
            return f"gradients of input {n} differ: {one_gradient.flatten()[:6].tolist()} {shown}"
    return ""


def _same(one: Tensor, other: Tensor, narrow: bool = False) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = 1e-2 if narrow else TOLERANCE if one.dtype in EXACT else 1e-3
    kind = torch.complex128 if one.is_complex() else torch.float64
    return torch.allclose(one.to(kind), other.to(kind), rtol=tolerance, atol=TOLERANCE, equal_nan=True)
