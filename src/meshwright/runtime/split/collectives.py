"""The exchanges among the ranks of one axis, on plain tensors. A pretended axis sends nothing: sizes alone come out right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.runtime.axis import along
from meshwright.runtime.split.layout import Cut, whole_size

gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 has new names for both; 2.11 knows the old ones only."""


@dataclass(frozen=True)
class Ranks:
    """The ranks along one axis, as one of them sees them."""

    axis: Axis
    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """None: pretended."""
    folded: bool = False
    """Each rank's part is two pieces of 2 · size, one from either end: rank r has the r-th and the r-th from the last."""

    @property
    def num_pieces(self) -> int:
        """Into how many pieces a dim that is cut must divide."""
        return 2 * self.size if self.folded else self.size

    @property
    def may_differ(self) -> bool:
        """Whether ranks may have parts of different sizes: tokens of cp, unless they are folded."""
        return self.axis == "cp" and not self.folded

    def sizes(self, whole: int) -> list[int]:
        """What each rank has of a run that is so long: the first ones have one more, where it does not divide."""
        each, rest = divmod(whole, self.size)
        return [each + (rank < rest) for rank in range(self.size)]

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            with along(self.axis):
                dist.all_reduce(total, group=self.group)
        return total

    def largest(self, tensor: Tensor) -> Tensor:
        found = tensor.clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            with along(self.axis):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def gather(self, part: Tensor, cut: Cut) -> Tensor:
        """The whole of which each rank has a part. Parts travel as large as the largest."""
        sizes = self._sizes_of(part, cut)
        runs, dim = _runs(grown(part, cut, sizes[0]), cut)
        parts = part.new_empty((self.size, *runs.shape))
        if self.group is not None:
            with along(self.axis):
                gather_into(parts.view(-1), runs.reshape(-1), group=self.group)
        every = [one.narrow(dim, 0, size) for one, size in zip(parts.unbind(0), sizes, strict=True)]
        return _fresh(self._unfold(torch.cat(every, dim=dim), dim), cut)

    def scatter(self, whole: Tensor, cut: Cut) -> Tensor:
        """The sum of every rank's tensor; each gets its part of it."""
        runs, dim = _runs(whole, cut)
        sizes = self.sizes(runs.shape[dim])
        parts = self._pieces(runs, dim)
        own = parts.new_empty(parts.shape[1:])
        if self.group is not None:
            with along(self.axis):
                scatter_into(own.view(-1), parts.view(-1), group=self.group)
        if own.shape[dim] != sizes[self.rank]:
            own = own.narrow(dim, 0, sizes[self.rank]).clone()
        return _fresh(own, cut)

    def own_part(self, whole: Tensor, cut: Cut) -> Tensor:
        """This rank's part of a tensor that all have."""
        return _joined(self.part_of(self.rank, *_runs(whole, cut)), cut)

    def part_of(self, rank: int, whole: Tensor, dim: int) -> Tensor:
        """Another's part of a dim that is one run."""
        if not self.folded:
            sizes = self.sizes(whole.shape[dim])
            return whole.narrow(dim, sum(sizes[:rank]), sizes[rank])
        size = whole.shape[dim] // self.num_pieces
        return torch.cat([whole.narrow(dim, place * size, size) for place in self._places(rank)], dim)

    def padded(self, part: Tensor, cut: Cut) -> Tensor:
        """A whole tensor that is zero but for this rank's part."""
        runs, dim = _runs(part, cut)
        shape, size, sizes = list(runs.shape), runs.shape[dim], self._sizes_of(part, cut)
        shape[dim] = sum(sizes)
        found = part.new_zeros(shape)
        if not self.folded:
            found.narrow(dim, sum(sizes[: self.rank]), size).copy_(runs)
            return _joined(found, cut)
        places = self._places(self.rank)
        for place, piece in zip(places, runs.chunk(len(places), dim), strict=True):
            found.narrow(dim, place * size // len(places), size // len(places)).copy_(piece)
        return _joined(found, cut)

    def swap(self, part: Tensor, now: Cut, then: Cut) -> Tensor:
        """A part along one dim becomes a part along another: every rank sends every other a piece, as large as the largest."""
        sizes = self._sizes_of(part, now)
        runs, dim = _runs(grown(part, now, sizes[0]), then)
        own = self.sizes(runs.shape[dim])[self.rank]
        pieces = self._pieces(runs, dim)
        received = torch.empty_like(pieces)
        if self.group is not None:
            with along(self.axis):
                dist.all_to_all_single(received.view(-1), pieces.view(-1), group=self.group)
        arrived = [_runs(_joined(piece.narrow(dim, 0, own), then), now) for piece in received.unbind(0)]
        dim = arrived[0][1]
        every = [runs.narrow(dim, 0, size) for (runs, _), size in zip(arrived, sizes, strict=True)]
        return _fresh(self._unfold(torch.cat(every, dim), dim), now)

    def _sizes_of(self, part: Tensor, cut: Cut) -> list[int]:
        """What each rank has of one run of a dim that is cut."""
        return self.sizes(whole_size(part.shape[cut.dim], cut, self) // cut.runs)

    def _pieces(self, whole: Tensor, dim: int) -> Tensor:
        """One after another, rank by rank, as large as the largest."""
        sizes = self.sizes(whole.shape[dim])
        pieces = self._fold(whole, dim).split(sizes, dim)
        return torch.stack(
            [grown(piece, Cut(dim), sizes[0]) for piece in pieces]
        ).contiguous()  # stack may keep channels last

    def _places(self, rank: int) -> tuple[int, ...]:
        """Which pieces a rank has."""
        return (rank, 2 * self.size - 1 - rank) if self.folded else (rank,)

    def _fold(self, whole: Tensor, dim: int) -> Tensor:
        """The pieces of each rank side by side, rank by rank."""
        return _reordered(whole, dim, self._order()) if self.folded else whole

    def _unfold(self, whole: Tensor, dim: int) -> Tensor:
        order = self._order()
        return _reordered(whole, dim, sorted(range(len(order)), key=order.__getitem__)) if self.folded else whole

    def _order(self) -> list[int]:
        return [place for rank in range(self.size) for place in self._places(rank)]

    def pass_on(self, tensor: Tensor) -> Hop:
        """To the next rank, while the same comes from the one before; the last is before the first."""
        if self.group is None:
            return Hop(torch.empty_like(tensor), tensor, ())
        over_host = (
            tensor.device.type == "cuda" and dist.get_backend(self.group) == "gloo"
        )  # gloo has no sends for a GPU
        leaving = tensor.cpu() if over_host else tensor
        landing = torch.empty_like(leaving)
        ranks = dist.get_process_group_ranks(self.group)
        calls = [
            dist.P2POp(dist.isend, leaving, ranks[(self.rank + 1) % self.size], self.group),
            dist.P2POp(dist.irecv, landing, ranks[(self.rank - 1) % self.size], self.group),
        ]
        with along(self.axis):
            return Hop(landing, leaving, tuple(dist.batch_isend_irecv(calls)), tensor.device)


@dataclass(frozen=True)
class Hop:
    """A message under way: kept at both ends until it has arrived."""

    landing: Tensor
    leaving: Tensor
    calls: tuple[Any, ...]
    device: torch.device | None = None

    def wait(self) -> Tensor:
        for call in self.calls:
            call.wait()
        return self.landing.to(self.device) if self.device else self.landing


def grown(tensor: Tensor, cut: Cut, size: int) -> Tensor:
    """Zeros behind each run of a dim, until it is so long."""
    runs, dim = _runs(tensor, cut)
    missing = size - runs.shape[dim]
    if not missing:
        return tensor
    shape = list(runs.shape)
    shape[dim] = missing
    return _joined(torch.cat([runs, runs.new_zeros(shape)], dim), cut)


def _reordered(tensor: Tensor, dim: int, order: list[int]) -> Tensor:
    pieces = tensor.chunk(len(order), dim)
    return torch.cat([pieces[place] for place in order], dim)


def _runs(tensor: Tensor, cut: Cut) -> tuple[Tensor, int]:
    """The tensor with the cut dim as two, where it is several runs, and the dim within a run."""
    if cut.runs == 1:
        return tensor, cut.dim
    found: Tensor = tensor.unflatten(cut.dim, (cut.runs, -1))
    return found, cut.dim + 1


def _joined(tensor: Tensor, cut: Cut) -> Tensor:
    return tensor if cut.runs == 1 else tensor.flatten(cut.dim, cut.dim + 1)


def _fresh(tensor: Tensor, cut: Cut) -> Tensor:
    """Joined, in memory of its own: a model may change what an exchange gave it, which torch refuses for views."""
    return _joined(tensor, cut) if cut.runs == 1 else _joined(tensor, cut).clone()
