"""What training adds to a model: the state its optimizer keeps, whether gradients are clipped, and which system runs it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from meshwright.core.codec import Value
from meshwright.core.training_system import TrainingSystem


class Recipe(Value, kw_only=True):
    """The defaults are AdamW with its two moments, without clipping, as Meshwright runs it."""

    optimizer_slots: Annotated[int, Meta(ge=0)] = 2
    """Tensors the size of a parameter that the optimizer keeps for it: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    optimizer_scalar_bytes: Annotated[int, Meta(ge=0)] = 4
    """Bytes it keeps beside them for each tensor: Adam's step count."""
    clips: bool = False
    fused_update: bool = True
    """Whether the update of a GPU's optimizer runs in one pass that needs no room of its own, as torch's fused ones do."""
    system: TrainingSystem = TrainingSystem()
    """The system that runs the plan; another one only where its published runs are costed."""
