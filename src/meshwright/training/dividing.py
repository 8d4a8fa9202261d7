"""Which rank writes which part of a state, decided by all ranks alike from what each of them holds.

    offer     every rank: the parts it could write, and how much memory it has for copies
    divide    the same on every rank: of several that hold a part, the one with the fewest bytes so far writes it

torch's distributed checkpoint says what a rank holds (`create_local_plan`). It would have ranks exchange that in pickles; here they
exchange values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from meshwright.core.codec import Value
from meshwright.core.errors import CheckpointError
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.training.checked.parts import fills
from meshwright.training.contents import Box, SavedTensor, file_of, key_of
from meshwright.training.tensors_file import NAMES, check_dtype

Place = tuple[str, tuple[int, ...] | None]
"""Of a part: the tensor's name and where in it the part begins; None for what is no tensor."""


class Piece(Value, kw_only=True):
    """A part of a tensor, or a value, that a rank holds."""

    name: str
    shape: tuple[int, ...] = ()
    """Of the whole tensor."""
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def place(self) -> Place:
        return (self.name, self.offsets)

    @property
    def num_bytes(self) -> int:
        return 0 if self.dtype is None else prod(self.sizes) * self.dtype.itemsize


class Offer(Value, kw_only=True):
    """What one rank could write."""

    pieces: tuple[Piece, ...] = ()
    copies: bool = True
    """Whether it copies tensors, so that training may go on while they are written."""
    host_bytes: int | None = None
    """That it could take for copies; None where that is not known."""
    problem: str = ""
    """Why it has nothing to offer, if so."""


@dataclass(frozen=True)
class Division:
    """Who writes what."""

    shares: list[list[Piece]]
    """By rank."""
    copies: bool
    """Whether every rank can copy its share."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for share in self.shares for piece in share)

    def plan_of(self, rank: int, items: Sequence[WriteItem]) -> SavePlan:
        """What one rank writes, of all that it holds."""
        own = {piece.place for piece in self.shares[rank]}
        return SavePlan([item for item in items if piece_of(item).place in own], storage_data=self.copies)

    def tensors(self) -> dict[str, SavedTensor]:
        """What will lie where."""
        found: dict[str, tuple[Piece, list[Box]]] = {}
        for rank, share in enumerate(self.shares):
            for piece in share:
                if piece.dtype is not None:
                    found.setdefault(piece.name, (piece, []))[1].append(_box(rank, piece))
        return {name: _described(piece, boxes) for name, (piece, boxes) in found.items()}


def divided(offer: Offer) -> Division:
    """Every rank calls it with its own offer."""
    offers = all_ranks(offer, Offer)
    for rank, each in enumerate(offers):
        if each.problem:
            raise CheckpointError(f"rank {rank}: {each.problem}")
    return divide(offers)


def divide(offers: Sequence[Offer]) -> Division:
    holders: dict[Place, list[int]] = defaultdict(list)
    pieces: dict[Place, Piece] = {}
    for rank, offer in enumerate(offers):
        for piece in offer.pieces:
            holders[piece.place].append(rank)
            pieces[piece.place] = piece
    shares: list[list[Piece]] = [[] for _ in offers]
    loads = [0] * len(offers)
    for place, ranks in holders.items():
        chosen = min(ranks, key=lambda rank: loads[rank])
        loads[chosen] += pieces[place].num_bytes or 1
        shares[chosen].append(pieces[place])
    needed = [sum(piece.num_bytes for piece in share) for share in shares]
    fits = all(
        offer.copies and (offer.host_bytes is None or own <= offer.host_bytes)
        for offer, own in zip(offers, needed, strict=True)
    )
    return Division(shares, fits)


def piece_of(item: WriteItem) -> Piece:
    data = item.tensor_data
    if data is None:
        return Piece(name=item.index.fqn)
    return Piece(
        name=item.index.fqn,
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        dtype=data.properties.dtype,
    )


def check_complete(tensors: dict[str, SavedTensor]) -> None:
    """Before anything is written: a tensor of which no rank holds some part would be no whole one in the checkpoint."""
    for name in _incomplete(tensors):
        raise CheckpointError(f"the ranks do not hold all of '{name}', each part once: this plan cannot be saved")


def _incomplete(tensors: dict[str, SavedTensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        is_whole = len(tensor.boxes) == 1 and tensor.boxes[0].sizes == tensor.shape
        if not is_whole and not fills(tensor.shape, ((box.offsets, box.sizes) for box in tensor.boxes)):
            yield name


def _box(rank: int, piece: Piece) -> Box:
    offsets = piece.offsets or ()
    key = key_of(piece.name, offsets, piece.sizes == piece.shape)
    return Box(offsets=offsets, sizes=piece.sizes, file=file_of(rank), key=key)


def _described(piece: Piece, boxes: list[Box]) -> SavedTensor:
    assert piece.dtype is not None
    check_dtype(piece.name, piece.dtype)
    return SavedTensor(dtype=NAMES[piece.dtype], shape=piece.shape, boxes=tuple(boxes))
