"""A site: one place of a forward where random numbers are drawn, named the same under every plan.

    'blocks.3.dropout' 0      the first draw of that module in a microbatch

The module is found by who called: the nearest function on the stack whose first argument is a module of the model. Only draws pay
for that, and code that runs again in backward is found as it was in forward.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

from torch import nn

OUTSIDE = "(no module)"
"""Where draws are that no module makes: a loss function, a copy of the model that is only followed."""


class Site(NamedTuple):
    module: str
    number: int

    def __str__(self) -> str:
        where = f"module '{self.module}'" if self.module else "the model's own forward"
        return where if self.number == 0 else f"{where} (its draw number {self.number + 1})"


class Sites:
    """Names the draws of one microbatch in the order they come."""

    def __init__(self, module: nn.Module) -> None:
        self._names: Mapping[int, str] = {id(part): name for name, part in module.named_modules()}
        self._module = module  # ids are of modules that live
        self._counts: Counter[str] = Counter()

    def next(self) -> Site:
        name = self._caller()
        self._counts[name] += 1
        return Site(name, self._counts[name] - 1)

    def begin(self) -> None:
        self._counts = Counter()

    def as_now(self) -> Sites:
        """To name again what comes from here on."""
        copied = object.__new__(Sites)
        copied._names, copied._module, copied._counts = self._names, self._module, Counter(self._counts)
        return copied

    def _caller(self) -> str:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(owner, nn.Module) and id(owner) in self._names:
                return self._names[id(owner)]
            frame = frame.f_back
        return OUTSIDE
