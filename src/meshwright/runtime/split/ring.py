"""Ring attention: each rank keeps its queries, keys and values go round the ranks, c - 1 steps forward.

Step i of rank r has the keys and values of rank j = r - i (mod c). With (out, lse) so far and (out', lse') of the piece:

    w = sigmoid(lse - lse')      out ← w out + (1 - w) out'      lse ← log(exp lse + exp lse')         -> _merged

Backward goes round once more: keys and values c - 1 steps, and with them the sums of their gradients c steps, the last of which
brings them home. Each hop is under way while a piece is worked on. A rank holds two pieces of keys and values, and two of sums,
at a time.

Ranks have one early and one late run of the tokens (Ranks.folded), so that where no token looks ahead all have as much to do:

    j = r      each sees those before it              half of all pairs
    j < r      all queries see the early keys         half
    j > r      the late queries see all keys          half                                              -> Ring.seen
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.runtime.own_backward import refuse_second_derivative
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.pieces import Piece

HEADS, TOKENS = -3, -2


@dataclass(frozen=True)
class Ring:
    """What all pieces of one attention have in common."""

    ranks: Ranks
    causal: bool
    scale: float
    mask: Tensor | None = None
    """[..., queries of this rank, all keys]: True where a key is seen, or what is added to the scores."""

    @property
    def owners(self) -> list[int]:
        """Whose keys are here, step by step."""
        return [(self.ranks.rank - step) % self.ranks.size for step in range(self.ranks.size)]

    def seen(self, owner: int, num_queries: int, num_keys: int) -> tuple[int, int]:
        """From which query on queries see keys of the owner, and how many of its keys."""
        if not self.causal or owner == self.ranks.rank:
            return 0, num_keys
        return (0, num_keys // 2) if owner < self.ranks.rank else (num_queries // 2, num_keys)

    def piece(self, query: Tensor, key: Tensor, value: Tensor, owner: int) -> Piece:
        """Of the queries and keys that meet."""
        first, end = self.seen(owner, query.shape[TOKENS], key.shape[TOKENS])
        query, key, value = query[..., first:, :], key[..., :end, :], value[..., :end, :]
        times = query.shape[HEADS] // key.shape[HEADS]
        if times > 1:
            key, value = (tensor.repeat_interleave(times, HEADS) for tensor in (key, value))
        looks_back = self.causal and owner == self.ranks.rank
        return Piece(query, key, value, self.scale, looks_back, self._mask_of(query, key.shape[TOKENS], owner))

    def _mask_of(self, query: Tensor, num_keys: int, owner: int) -> Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask
        if mask.shape[-1] > 1:
            mask = self.ranks.part_of(owner, mask, mask.dim() - 1)
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
            found = _merged(found, ring.piece(query, *_unpacked(passing, key, value), owner).attend())
            passing = hop.wait() if hop else passing
        assert found is not None
        out, lse = found[0].to(query.dtype), found[1]
        ctx.save_for_backward(query, key, value, out, lse.masked_fill(lse == -torch.inf, 0.0))
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative("ring attention (cp with context ring)")
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        of_query = torch.zeros_like(query, dtype=_summed_in(query))
        passing, coming = _packed(key, value), None
        for owner in ring.owners:
            hop = ring.ranks.pass_on(passing) if owner != ring.owners[-1] else None
            piece = ring.piece(query, *_unpacked(passing, key, value), owner)
            first = query.shape[TOKENS] - piece.query.shape[TOKENS]
            own_gradient, own_out = (tensor[..., first:, :].contiguous() for tensor in (gradient, out))
            own, *others = piece.gradients(own_gradient, own_out, lse[..., first:].contiguous())
            of_query[..., first:, :].add_(own)
            sums = _packed(*(_of_all(one, key) for one in others))
            coming = ring.ranks.pass_on(sums if coming is None else coming.wait() + sums)
            passing = hop.wait() if hop else passing
        assert coming is not None
        of_key, of_value = _unpacked(coming.wait(), key, value)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _merged(so_far: tuple[Tensor, Tensor] | None, piece: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The piece may be of the late queries only."""
    out, lse = piece
    out = out.to(_summed_in(out))
    if so_far is None:
        return out, lse
    first = so_far[1].shape[-1] - lse.shape[-1]
    before, lse_before = so_far[0][..., first:, :], so_far[1][..., first:]
    weight = torch.sigmoid(lse_before - lse).nan_to_num(0.0)[..., None]  # nan: nothing seen in either, both are zero
    merged = out + weight.to(out.dtype) * (before - out), torch.logaddexp(lse_before, lse)
    if not first:
        return merged
    return torch.cat([so_far[0][..., :first, :], merged[0]], TOKENS), torch.cat([so_far[1][..., :first], merged[1]], -1)


def _summed_in(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """One message of both."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(message: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    one, other = message.split([key.numel(), value.numel()])
    return one.view(key.shape), other.view(value.shape)


def _of_all(gradient: Tensor, key: Tensor) -> Tensor:
    """Of all keys, zero for those that were not seen; of keys that several heads of queries read, the sum of theirs."""
    gradient = gradient.to(_summed_in(gradient))
    if gradient.shape[HEADS] != key.shape[HEADS]:
        grouped: Tensor = gradient.unflatten(HEADS, (key.shape[HEADS], -1))
        gradient = grouped.sum(HEADS)
    unseen = key.shape[TOKENS] - gradient.shape[TOKENS]
    return F.pad(gradient, (0, 0, 0, unseen)) if unseen else gradient
