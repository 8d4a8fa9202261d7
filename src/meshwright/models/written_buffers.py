"""Buffers outside of blocks that a forward reads, and writes with what a block made (codes that follow their samples): every stage
runs that code, and only one of them has the values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from meshwright.core.errors import PlanError
from meshwright.models.follow import number_of
from meshwright.models.location import line_now


class WrittenBuffers:
    """Of one forward of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.names = {id(buffer): name for name, buffer in module.named_buffers()}
        self.touched: set[int] = set()

    def meet(self, leaves: Iterable[Any]) -> None:
        """What a function outside of blocks is given."""
        self.touched.update(id(leaf) for leaf in leaves if id(leaf) in self.names)

    def check_write(self, target: Any, name: str, met: set[int]) -> None:
        """target: what is written in place, with what a block made. met: what was met before this call."""
        if not isinstance(target, Tensor) or id(target) not in met or number_of(target) is not None:
            return
        buffer = self.names[id(target)]
        raise PlanError(
            f"the model cannot be cut: outside of its blocks its forward reads buffer '{buffer}', and writes it with what a block "
            f"made ({name}, {line_now()}), which one stage alone could do: write it inside a block, or after the step, or "
            "set pp to 1"
        )
