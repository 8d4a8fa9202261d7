"""Ring attention: each rank keeps its queries, keys and values go round the ranks, c - 1 steps forward.

Step i of rank r has the keys and values of rank j = r - i (mod c). With (out, lse) so far and (out', lse') of the piece:

    w = sigmoid(lse - lse')      out ← w out + (1 - w) out'      lse ← log(exp lse + exp lse')         -> _merged

Backward goes round once more: keys and values c - 1 steps, and with them the sums of their gradients c steps, the last of which
brings them home. Where no token looks ahead, a rank has nothing to do with the pieces of later ones, and passes them on.
Each hop is under way while a piece is worked on. A rank holds two pieces of keys and values, and two of sums, at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.pieces import Dropping, Piece

HEADS = -3


@dataclass(frozen=True)
class Ring:
    """What all pieces of one attention have in common."""

    ranks: Ranks
    causal: bool
    scale: float
    mask: Tensor | None = None
    """[..., queries of this rank, all keys]: True where a key is seen, or what is added to the scores."""
    dropping: Dropping | None = None

    @property
    def owners(self) -> list[int]:
        """Whose keys are here, step by step."""
        return [(self.ranks.rank - step) % self.ranks.size for step in range(self.ranks.size)]

    def piece(self, query: Tensor, key: Tensor, value: Tensor, owner: int) -> Piece | None:
        """None where every key of the owner comes later than every query here."""
        if self.causal and owner > self.ranks.rank:
            return None
        times = query.shape[HEADS] // key.shape[HEADS]
        if times > 1:
            key, value = (tensor.repeat_interleave(times, HEADS) for tensor in (key, value))
        looks_back = self.causal and owner == self.ranks.rank
        dropping = self.dropping.of(owner) if self.dropping else None
        return Piece(query, key, value, self.scale, looks_back, self._mask_of(query, key.shape[-2], owner), dropping)

    def _mask_of(self, query: Tensor, num_keys: int, owner: int) -> Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask
        if mask.shape[-1] > 1:
            mask = mask.narrow(-1, owner * num_keys, num_keys)
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)
        return mask.to(query.dtype).expand(*query.shape[:-1], num_keys)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """The result for this rank's queries, over the keys and values of all ranks."""
    found: Tensor = _RingAttention.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        found: tuple[Tensor, Tensor] | None = None
        passing = _packed(key, value)
        for owner in ring.owners:
            hop = ring.ranks.pass_on(passing) if owner != ring.owners[-1] else None
            piece = ring.piece(query, *_unpacked(passing, key, value), owner)
            if piece is not None:
                found = _merged(found, piece.attend())
            passing = hop.wait() if hop else passing
        assert found is not None  # its own keys are never all ahead
        out, lse = found[0].to(query.dtype), found[1]
        ctx.save_for_backward(query, key, value, out, lse.masked_fill(lse == -torch.inf, 0.0))
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        gradient = gradient.contiguous()
        of_query = torch.zeros_like(query, dtype=_summed_in(query))
        passing, coming = _packed(key, value), None
        for owner in ring.owners:
            hop = ring.ranks.pass_on(passing) if owner != ring.owners[-1] else None
            piece = ring.piece(query, *_unpacked(passing, key, value), owner)
            sums = torch.zeros_like(passing, dtype=_summed_in(query)) if coming is None else coming.wait()
            if piece is not None:
                own, *others = piece.gradients(gradient, out, lse)
                of_query += own
                sums = sums + _packed(*(_by_group(one, key.shape[HEADS]) for one in others))
            coming = ring.ranks.pass_on(sums)
            passing = hop.wait() if hop else passing
        assert coming is not None
        of_key, of_value = _unpacked(coming.wait(), key, value)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _merged(so_far: tuple[Tensor, Tensor] | None, piece: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = piece
    out = out.to(_summed_in(out))
    if so_far is None:
        return out, lse
    before, lse_before = so_far
    weight = torch.sigmoid(lse_before - lse).nan_to_num(0.0)[..., None]  # nan: nothing seen in either, both are zero
    return out + weight.to(out.dtype) * (before - out), torch.logaddexp(lse_before, lse)


def _summed_in(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """One message of both."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(message: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    one, other = message.split([key.numel(), value.numel()])
    return one.view(key.shape), other.view(value.shape)


def _by_group(gradient: Tensor, num_heads: int) -> Tensor:
    """Of keys that several heads of queries read: the sum of theirs."""
    if gradient.shape[HEADS] == num_heads:
        return gradient
    grouped: Tensor = gradient.to(_summed_in(gradient)).unflatten(HEADS, (num_heads, -1))
    return grouped.sum(HEADS)
