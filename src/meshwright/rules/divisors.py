"""The divisors of a number, as many questions about batches and ranks need them."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, the smallest first."""
    small = [part for part in range(1, isqrt(number) + 1) if number % part == 0]
    return (*small, *(number // part for part in reversed(small) if part * part != number))


def near_divisors(number: int, wish: int) -> tuple[int, ...]:
    """The largest below a wish that no divisor meets, and the smallest above it."""
    found = divisors(number)
    below = [part for part in found if part < wish]
    above = [part for part in found if part > wish]
    return (*below[-1:], *above[:1])
