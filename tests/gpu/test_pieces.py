"""Pieces of attention on a GPU: torch's flash kernel in 16 bits, plain formulas in 32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.runtime.split.pieces import Piece

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH = 64


def outcome(dtype: torch.dtype, device: str, causal: bool, masked: bool) -> list[Tensor]:
    """Result, sums and gradients, where the sums of all pieces are those of this one and another."""
    torch.manual_seed(0)
    query, key, value, gradient = (torch.randn(2, 4, 640, WIDTH) for _ in range(4))
    mask = torch.randn(2, 4, 640, 640) if masked else None
    given = [tensor.to(device, dtype) for tensor in (query, key, value)]
    piece = Piece(*given, WIDTH**-0.5, causal, mask.to(device, dtype) if mask is not None else None)
    out, lse = piece.attend()
    found = piece.gradients(gradient.to(device, dtype), out, lse + 0.5)
    return [tensor.double().cpu() for tensor in (out, lse, *found)]


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-4)])
def test_a_piece_is_that_of_the_cpu_in_float64(dtype: torch.dtype, bound: float, causal: bool, masked: bool) -> None:
    expected = outcome(torch.float64, "cpu", causal, masked)
    for one, other in zip(outcome(dtype, "cuda", causal, masked), expected, strict=True):
        assert torch.linalg.vector_norm(one - other) <= bound * torch.linalg.vector_norm(other)
