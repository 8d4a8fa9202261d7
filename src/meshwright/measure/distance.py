"""How far a tensor is from the expected one. Entries that are alike differ by nothing, also where both are infinite (a mask of
-inf) or both are no number; one that is infinite or no number on one side alone is infinitely far."""

from __future__ import annotations

import torch
from torch import Tensor


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two entries."""
    found, expected = _numbers(found), _numbers(expected)
    alike = (found == expected) | (found.isnan() & expected.isnan())
    apart = torch.where(alike, 0.0, found - expected).abs()
    return float(torch.where(apart.isfinite(), apart, torch.inf).max()) if apart.numel() else 0.0


def largest(tensor: Tensor) -> float:
    """The largest magnitude of an entry that has one."""
    magnitudes = torch.where(tensor.isfinite(), _numbers(tensor), 0).abs()
    return float(magnitudes.max()) if tensor.numel() else 0.0


def _numbers(tensor: Tensor) -> Tensor:
    """Parameters that nothing trains may be truth values, which cannot be subtracted."""
    return tensor.long() if tensor.dtype == torch.bool else tensor
