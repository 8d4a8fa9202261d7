"""Where a parameter's values come from: a tensor of a file as it is, or several put together.

    Whole(name)             a tensor of the folder
    Stack(sources)          along a new first dim: experts that are stored one by one
    Join(sources, dim)      one after another along a dim: gate and up of a gated MLP
    Turn(source, dims)      with two dims exchanged

Each gives any extent of itself and reads no more than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.runtime.extent import Extent, between, extent_sizes
from meshwright.training.weights_folder import WeightsFolder


@dataclass(frozen=True)
class Whole:
    name: str

    def shape(self, folder: WeightsFolder) -> tuple[int, ...]:
        return folder.tensors[self.name].shape

    def read(self, folder: WeightsFolder, extent: Extent) -> Tensor:
        return folder.read(self.name, extent)

    def names(self) -> Iterator[str]:
        yield self.name


@dataclass(frozen=True)
class Stack:
    parts: tuple[Source, ...]

    def shape(self, folder: WeightsFolder) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape(folder))

    def read(self, folder: WeightsFolder, extent: Extent) -> Tensor:
        chosen = [number for stretch in extent[0] for number in range(stretch.start, stretch.stop)]
        found = [self.parts[number].read(folder, extent[1:]) for number in chosen]
        return torch.stack(found) if found else torch.empty(extent_sizes(extent))

    def names(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.names()


@dataclass(frozen=True)
class Join:
    parts: tuple[Source, ...]
    dim: int

    def shape(self, folder: WeightsFolder) -> tuple[int, ...]:
        shapes = [part.shape(folder) for part in self.parts]
        return tuple(
            sum(shape[dim] for shape in shapes) if dim == self.dim else size for dim, size in enumerate(shapes[0])
        )

    def read(self, folder: WeightsFolder, extent: Extent) -> Tensor:
        found = []
        for stretch in extent[self.dim]:
            before = 0
            for part in self.parts:
                size = part.shape(folder)[self.dim]
                own = between((stretch,), max(before - stretch.start, 0), before + size - stretch.start)
                shifted = tuple(type(one)(one.start - before, one.stop - before) for one in own)
                if shifted:
                    found.append(part.read(folder, (*extent[: self.dim], shifted, *extent[self.dim + 1 :])))
                before += size
        return torch.cat(found, self.dim) if found else torch.empty(extent_sizes(extent))

    def names(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.names()


@dataclass(frozen=True)
class Turn:
    part: Source
    first: int
    second: int

    def shape(self, folder: WeightsFolder) -> tuple[int, ...]:
        shape = list(self.part.shape(folder))
        shape[self.first], shape[self.second] = shape[self.second], shape[self.first]
        return tuple(shape)

    def read(self, folder: WeightsFolder, extent: Extent) -> Tensor:
        turned = list(extent)
        turned[self.first], turned[self.second] = turned[self.second], turned[self.first]
        return self.part.read(folder, tuple(turned)).transpose(self.first, self.second)

    def names(self) -> Iterator[str]:
        yield from self.part.names()


Source = Whole | Stack | Join | Turn
