"""What training adds to a model: how much state its optimizer keeps, and whether gradients are clipped."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from meshwright.core.codec import Value


class Recipe(Value, kw_only=True):
    optimizer_slots: Annotated[int, Meta(ge=0)] = 2
    """Tensors the size of a parameter that the optimizer keeps for it: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    optimizer_scalar_bytes: Annotated[int, Meta(ge=0)] = 4
    """Bytes it keeps beside them for each tensor: Adam's step count."""
    clips: bool = False
