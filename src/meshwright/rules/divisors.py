"""The divisors of a number, as questions about batches, ranks and experts need them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import isqrt

from meshwright.core.errors import PlanError
from meshwright.core.plan import Mesh


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, the smallest first."""
    small = [part for part in range(1, isqrt(number) + 1) if number % part == 0]
    return (*small, *(number // part for part in reversed(small) if part * part != number))


def near_divisors(number: int, wish: int) -> tuple[int, ...]:
    """The largest divisor below `wish`, which is none itself, and the smallest above it."""
    found = divisors(number)
    below = [part for part in found if part < wish]
    above = [part for part in found if part > wish]
    return (*below[-1:], *above[:1])


def check_experts(counts: Iterable[int], mesh: Mesh) -> None:
    """Refuse an ep that does not divide each of these numbers of experts."""
    for count in counts:
        if count % mesh.ep:
            legal = [str(degree) for degree in divisors(count) if mesh.dp % degree == 0]
            raise PlanError(
                f"{count} experts do not divide over ep={mesh.ep}: with dp={mesh.dp} use {', '.join(legal)}"
            )
