"""Quantities that grow with the number of samples."""

from __future__ import annotations

import msgspec


class Affine(msgspec.Struct, frozen=True, array_like=True):
    """`fixed + per_sample · num_samples`, written as two numbers."""

    fixed: float
    per_sample: float

    def at(self, num_samples: float) -> float:
        return self.fixed + self.per_sample * num_samples


NOTHING = Affine(0.0, 0.0)
