"""The runtime's answer about a sharding: legal as written, legal with changes, or refused.

The runtime finds it out by trying the module on fake tensors; the search takes it as a value. Degrees it was not asked about
are taken as the proposal says.
"""

from __future__ import annotations

from meshwright.core.bounds import Degree
from meshwright.core.codec import Value
from meshwright.core.plan import BlockSharding, ContextWay, Plan

Key = tuple[int, int, bool, ContextWay]
"""Degrees of tp and cp, sequence parallel, and how attention is done under cp."""


class LegalSharding(Value, kw_only=True):
    """The answer for one set of degrees."""

    tp: Degree = 1
    cp: Degree = 1
    sequence_parallel: bool = False
    context: ContextWay = "heads"
    sharding: tuple[BlockSharding, ...] = ()
    """The sharding that runs; a tensor that stays whole though it was to be split has the reason."""
    refusal: str = ""
    """Why no plan with these degrees runs; empty where one does."""

    @property
    def key(self) -> Key:
        return (self.tp, self.cp, self.sequence_parallel, self.context)


def key_of(plan: Plan) -> Key:
    """The degrees that an answer is for."""
    return (plan.mesh.tp, plan.mesh.cp, plan.sequence_parallel, plan.context)
