"""Attention of a rank's queries with one piece of the keys and values, and its gradients.

    s = scale · q kᵀ + mask        lse = log Σ_keys exp(s)        out = exp(s - lse) v

A piece's results are merged with those of the others by their lse (runtime/split/ring.py). Backward is given the lse and the
result of all pieces together, so that p = exp(s - lse) is this piece's part of the whole softmax:

    dv = pᵀ do      ds = p ∘ (do vᵀ - Σ_width do ∘ out)      dq = scale · ds k      dk = scale · dsᵀ q

torch's flash kernels give and take an lse: used where they run. Elsewhere the formulas run on some rows of queries
at a time: in neither is there ever a matrix of all queries and all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from meshwright.runtime._torch import flash_attention, flash_gradients

HALVES = (torch.float16, torch.bfloat16)
ROWS = 512
"""Queries at a time, where no flash kernel runs."""
FLASH_WIDTH, MOST_FLASH_WIDTH = 8, 256
"""CUDA's takes heads whose width is a multiple of the one, up to the other."""


@dataclass(frozen=True)
class Piece:
    """One call: the queries [..., heads, queries, width], a piece of keys and values, and what hides pairs of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False
    """Queries and keys are of the same tokens, of which none looks ahead."""
    mask: Tensor | None = None
    """What is added to the scores, as large as they are."""

    def attend(self) -> tuple[Tensor, Tensor]:
        """The result of this piece alone, and its lse [..., heads, queries]: -inf where all is hidden."""
        if self._is_flash:
            out, lse = flash_attention(self.query, self.key, self.value, self.mask, self.causal, self.scale)
        else:
            with _in_full(self.query):
                outs, sums = zip(*(part._rows_attend() for part in self._by_rows()), strict=True)
            out, lse = torch.cat(outs, -2), torch.cat(sums, -1)
        if self.mask is not None:  # a kernel may call it 0 where nothing is seen
            lse = lse.masked_fill((self.mask == -inf).all(-1), -inf)
        return out, lse

    def gradients(self, gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of query, key and value. out, lse: of all pieces together."""
        if self._is_flash:
            tensors = (self.query, self.key, self.value, out, lse)
            return flash_gradients(gradient, tensors, self.mask, self.causal, self.scale)
        of_queries, of_key, of_value = [], _zeros(self.key), _zeros(self.value)
        rows = zip(gradient.split(ROWS, -2), out.split(ROWS, -2), lse.split(ROWS, -1), strict=True)
        for part, (own_gradient, own_out, own_lse) in zip(self._by_rows(), rows, strict=True):
            weights = (part._scores() - own_lse[..., None]).exp()
            own_gradient = _wide(own_gradient)
            shift = (own_gradient * own_out).sum(-1, keepdim=True)
            of_scores = weights * (own_gradient @ part.value.mT - shift) * part.scale
            of_queries.append(of_scores @ part.key)
            of_key += of_scores.mT @ part.query
            of_value += weights.mT @ own_gradient
        return torch.cat(of_queries, -2), of_key, of_value

    @property
    def _is_flash(self) -> bool:
        query, value = self.query, self.value
        if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
            return False
        if query.device.type == "cpu":
            return True
        width = query.shape[-1]
        fits = width % FLASH_WIDTH == 0 and width <= MOST_FLASH_WIDTH
        return query.device.type == "cuda" and query.dtype in HALVES and self.mask is None and fits

    def _by_rows(self) -> Iterator[Piece]:
        """Some queries at a time; of causal ones the mask says which keys they see."""
        num_queries = self.query.shape[-2]
        for first in range(0, num_queries, ROWS):
            query = _wide(self.query[..., first : first + ROWS, :])
            mask = self.mask
            if mask is not None:
                mask = mask[..., first : first + ROWS, :]
            if self.causal:
                places = torch.arange(num_queries, device=query.device)
                ahead = places > places[first : first + ROWS, None]
                mask = query.new_zeros(ahead.shape).masked_fill(ahead, -inf)
            yield replace(self, query=query, key=_wide(self.key), value=_wide(self.value), mask=mask, causal=False)

    def _rows_attend(self) -> tuple[Tensor, Tensor]:
        scores = self._scores()
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -inf, 0.0)[..., None]).exp()
        return weights @ self.value, lse

    def _scores(self) -> Tensor:
        found = self.query @ self.key.mT * self.scale
        return found if self.mask is None else found + self.mask


def _wide(tensor: Tensor) -> Tensor:
    """Sums of 16-bit products are made in 32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(_wide(tensor))


def _in_full(tensor: Tensor) -> torch.autocast:
    """Without casts back to 16 bits."""
    return torch.autocast(tensor.device.type, enabled=False)
