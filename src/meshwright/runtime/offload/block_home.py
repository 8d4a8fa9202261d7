"""The home of a block: its parameters on the host, where they live while the block is not on the device.

    master     what the optimizer updates, in the dtype the plan stores; the module's own parameters while nothing runs
    working    what the device is given, in the dtype it computes in; the same memory where that is the same dtype

Both are flat, so that a block crosses the link in one piece. Over dp ranks a parameter whose first dim divides evenly is *cut*:
a rank's home has its rows only; the others are whole on every rank.

    at home      [cut, own rows …, whole …]            local_elements
    on a device  [cut, all rows …, whole …]            full_elements
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.runtime.offload.host import padded


@dataclass(frozen=True)
class Member:
    """One parameter of a block, under every name it has there."""

    places: tuple[tuple[nn.Module, str], ...]
    names: tuple[str, ...]
    shape: torch.Size
    trainable: bool
    parts: int
    """Over how many ranks its first dim is cut."""

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size((self.shape[0] // self.parts, *self.shape[1:])) if self.parts > 1 else self.shape

    @property
    def parameter(self) -> nn.Parameter:
        """As it is in the module now."""
        owner, leaf = self.places[0]
        found = owner._parameters[leaf]
        assert found is not None
        return found

    def put(self, parameter: nn.Parameter) -> None:
        for owner, leaf in self.places:
            owner._parameters[leaf] = parameter


class BlockHome:
    def __init__(self, name: str, members: Iterable[Member]) -> None:
        self.name = name
        self.members = sorted(members, key=lambda member: member.parts == 1)  # those that are cut come first
        self.local_shapes = tuple(member.local_shape for member in self.members)
        self.cut_elements = sum(member.local_shape.numel() for member in self.members if member.parts > 1)
        whole = sum(member.shape.numel() for member in self.members if member.parts == 1)
        self.local_elements = self.cut_elements + whole
        self.full_elements = sum(member.shape.numel() for member in self.members)
        self.masters: list[nn.Parameter] = []
        self._master: Tensor | None = None
        self._working: Tensor | None = None

    @property
    def working(self) -> Tensor:
        assert self._working is not None, "the block has not moved in"
        return self._working

    @property
    def num_sent(self) -> int:
        """Elements of what leaves over dp ranks: gradients, and behind them a figure for each member, 0 where no rank has one."""
        return self.local_elements + len(self.members)

    @property
    def trainable(self) -> bool:
        return any(member.trainable for member in self.members)

    def move_in(self, working: Tensor, master: Tensor) -> None:
        """Both flat, with what this rank holds of each member; the same memory where the dtype is the same."""
        self._working = working
        self._master = master
        self.masters = [
            nn.Parameter(view, member.trainable)
            for view, member in zip(self.local_views(master), self.members, strict=True)
        ]
        self.restore()

    def fill(self, values: list[Tensor]) -> None:
        """values: what this rank holds of each member."""
        for master, value in zip(self.masters, values, strict=True):
            master.detach().copy_(value)
        self.refresh()

    def rebase(self, master: Tensor) -> None:
        """The masters are in other memory from now on."""
        self._master = master
        for parameter, view in zip(self.masters, self.local_views(master), strict=True):
            parameter.data = view

    def refresh(self) -> None:
        """After an update, or when masters were loaded: the working copy follows."""
        assert self._master is not None
        if self.working is not self._master:
            self.working.copy_(self._master)

    def put(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the block compute with these."""
        for member, parameter in zip(self.members, parameters, strict=True):
            member.put(parameter)

    def restore(self) -> None:
        self.put(self.masters)

    def local_views(self, flat: Tensor) -> list[Tensor]:
        return list(_views(flat, self.local_shapes))

    def full_views(self, flat: Tensor) -> list[Tensor]:
        return list(_views(flat, (member.shape for member in self.members)))

    def num_bytes(self, item_bytes: int) -> int:
        """Of host memory for one flat tensor of it."""
        return padded(self.local_elements * item_bytes)


def _views(flat: Tensor, shapes: Iterable[torch.Size]) -> Iterator[Tensor]:
    start = 0
    for shape in shapes:
        yield flat[start : start + shape.numel()].view(shape)
        start += shape.numel()


def find_members(module: nn.Module, blocks: Iterable[str], degree: int) -> dict[str, list[Member]]:
    """Block → its parameters. One with a name outside the block is in none: it stays on the device."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    shapes: dict[int, nn.Parameter] = {}
    for path, part in module.named_modules(remove_duplicate=False):  # a part that blocks share has a name in each
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                shapes[id(parameter)] = parameter
                places.setdefault(id(parameter), []).append((f"{path}.{leaf}".lstrip("."), part, leaf))
    found: dict[str, list[Member]] = {name: [] for name in blocks}
    for key, named in places.items():
        homes = {_block_of(name, found) for name, _, _ in named}
        block = homes.pop() if len(homes) == 1 else ""
        if block:
            found[block].append(_member(shapes[key], named, degree))
    return found


def _member(parameter: nn.Parameter, named: list[tuple[str, nn.Module, str]], degree: int) -> Member:
    shape = parameter.shape
    parts = degree if shape and shape[0] and shape[0] % degree == 0 else 1
    return Member(
        places=tuple((owner, leaf) for _, owner, leaf in named),
        names=tuple(name for name, _, _ in named),
        shape=shape,
        trainable=parameter.requires_grad,
        parts=parts,
    )


def _block_of(name: str, blocks: Iterable[str]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), "")
