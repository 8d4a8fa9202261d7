"""Experts that lie over ep: a rank keeps equal shares of the experts that are stacked in one parameter."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.core.errors import PlanError
from meshwright.core.plan import Mesh
from meshwright.rules.divisors import divisors


def check_experts(counts: Iterable[int], mesh: Mesh) -> None:
    """Refuse an ep that does not divide each of these numbers of experts."""
    for count in counts:
        if count % mesh.ep:
            legal = [str(degree) for degree in divisors(count) if mesh.dp % degree == 0]
            raise PlanError(
                f"{count} experts do not divide over ep={mesh.ep}: with dp={mesh.dp} use {', '.join(legal)}"
            )
