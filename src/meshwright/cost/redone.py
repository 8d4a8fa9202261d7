"""Which ops of a block's forward a recompute does again, and which results it therefore need not keep."""

from __future__ import annotations

from typing import Literal

from meshwright.core.cluster import FLOP_KINDS
from meshwright.core.graph import Kind
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe

Mode = Literal["none", "selective", "selective ops", "full"]


def modes_of(plan: Plan, recipe: Recipe) -> dict[str, Mode]:
    """Block → how it is recomputed; blocks that keep everything are left out."""
    selective: Mode = "selective ops" if recipe.selective_ops else "selective"
    return {
        **dict.fromkeys(plan.recomputed("selective"), selective),
        **dict.fromkeys(plan.recomputed("full"), "full"),
    }


def redone_ops(kind: Kind, mode: Mode) -> frozenset[int]:
    """Numbers of the forward ops that backward does again."""
    forward = [number for number, op in enumerate(kind.ops) if op.phase == "forward"]
    if mode == "full":
        return frozenset(forward)
    if mode == "selective":
        return frozenset(number for number in forward if kind.ops[number].region == "attention")
    if mode == "selective ops":
        matmuls = [
            number for number in forward if kind.ops[number].kind in FLOP_KINDS and kind.ops[number].kind != "attention"
        ]
        kept = {*matmuls[::2], *(number for number in forward if kind.ops[number].kind == "attention")}
        return frozenset(number for number in forward if number not in kept)
    return frozenset()
