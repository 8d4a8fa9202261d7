"""Loss scaling for fp16: the loss is multiplied by S before backward, so that small gradients do not vanish, and gradients are
divided by S before the update.

    some gradient of some rank is not finite    no rank updates, S ← S / 2
    GROWTH_INTERVAL good steps in a row         S ← 2 S

The rule and its constants are those of torch.amp.GradScaler. Ranks must agree on every step: those that hold other gradients
tell each other whether theirs are finite, one number along each axis that divides them. S is a power of two: dividing by it
changes no digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from meshwright.core.axes import Axis
from meshwright.runtime.axis import along
from meshwright.runtime.clip import local

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class LossScale:
    """The same on every rank."""

    def __init__(self, groups: Mapping[Axis, dist.ProcessGroup]) -> None:
        """groups: along each axis that divides gradients, the ranks that hold the others."""
        self.scale = FIRST_SCALE
        self.num_good_steps = 0
        self._groups = groups

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide the gradients by the scale, and choose the next; False where some are not finite: then skip the update."""
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if not self._are_finite(gradients):
            self.scale, self.num_good_steps = self.scale / 2, 0
            return False
        for gradient in gradients:
            gradient.div_(self.scale)
        self.num_good_steps += 1
        if self.num_good_steps == GROWTH_INTERVAL:
            self.scale, self.num_good_steps = self.scale * 2, 0
        return True

    def _are_finite(self, gradients: list[Tensor]) -> bool:
        bad = (~torch.isfinite(get_total_norm(gradients, math.inf))).float()
        for axis, group in self._groups.items():
            with along(axis):
                dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
        return not bool(bad)

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": torch.tensor(self.scale), "num_good_steps": torch.tensor(self.num_good_steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.scale, self.num_good_steps = float(state["scale"]), int(state["num_good_steps"])
