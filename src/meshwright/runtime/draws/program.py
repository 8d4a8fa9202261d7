"""The draws of a Program: learnt at its first step, then the same numbers under every plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.models.objective import Batch
from meshwright.models.sketch import Sketch
from meshwright.runtime.draws.learn import check_modules, learn
from meshwright.runtime.draws.mode import Draws
from meshwright.runtime.precision import STORED


class SampleDraws:
    """Made of the whole module, before anything is done to it."""

    def __init__(self, module: nn.Module, plan: Plan, device: torch.device, seed: int) -> None:
        check_draws(plan)
        check_modules(module)
        self.plan, self.seed = plan, seed
        self.sketch: Sketch | None = Sketch(module, (), STORED[plan.precision], device)
        self.replica = 0
        self._draws: Draws | None = None

    def begin(self, module: nn.Module, replica: int) -> None:
        """module: as it was spread; its parts keep their names."""
        self.module, self.replica = module, replica

    @contextmanager
    def microbatch(self, step: int, index: int, batch: Batch) -> Iterator[None]:
        """What is drawn inside is of this microbatch of the step."""
        if self._draws is None:
            assert self.sketch is not None
            self.sketch.train_like(self.module)
            self._draws, self.sketch = Draws(self.module, learn(self.sketch, batch), self.seed), None
        first = (self.replica * self.plan.num_microbatches + index) * self.plan.microbatch
        with self._draws.microbatch(step, range(first, first + self.plan.microbatch)):
            yield


def check_draws(plan: Plan) -> None:
    """What does not run with them is refused by name."""
    if plan.compile:
        raise PlanError(
            "random numbers by sample: compiled code draws by itself: set compile to false, or random to 'rank'"
        )
    if plan.offload.what == "parameters":
        raise PlanError(
            "random numbers by sample: blocks of streamed parameters run again without them: set offload to none or optimizer, or "
            "random to 'rank'"
        )
