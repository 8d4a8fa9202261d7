"""The check of a module that is in memory: made when its first batch is known, before anything is trained.

The first rank compares a small copy on its own host; the others wait for what it says.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.core.codec import stable_hash
from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.measure.checking.check import Checked, check
from meshwright.measure.checking.kept import Kept
from meshwright.measure.checking.live import (
    CalledAs,
    CannotCopyError,
    LiveModel,
    as_batch,
    skeleton,
    small_batch,
    weighted_output,
)
from meshwright.measure.checking.reduced import needs_check
from meshwright.models.objective import Batch, Objective, num_samples
from meshwright.runtime.messages.exchange import from_first
from meshwright.runtime.ranks import join


class FirstBatch:
    """Holds a copy of a module without its parameters until the first batch comes."""

    def __init__(self, module: nn.Module, plan: Plan, objective: Objective | None) -> None:
        """objective: None for a loop of the user's own, whose loss is not known: what the model returns is compared."""
        self.plan, self.rank = plan, join()
        self.objective = objective or Objective(loss=weighted_output, count=num_samples)
        self.module, self.reason = _copied(module) if needs_check(plan) and self.rank.is_first else (None, "")
        self.is_wanted = needs_check(plan)

    def check_call(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Checked:
        """The same for a forward that was called so."""
        if self.module is not None:
            self.module = CalledAs(self.module, len(arguments))
        return self.check(as_batch(arguments, options))

    def check(self, batch: Batch) -> Checked:
        """On every rank. Raises PlanError on all of them where the copy differs."""
        if not self.is_wanted:
            return Checked(status="not needed")
        self.is_wanted = False
        found = from_first(lambda: self._on_first_rank(batch), Checked | str)
        if isinstance(found, str):
            raise PlanError(found)
        return found

    def _on_first_rank(self, batch: Batch) -> Checked | str:
        if self.module is None:
            return _said(Checked(status="not checked", words=self.reason))
        try:
            live = LiveModel(self.module, small_batch(batch), self.objective.loss, self.objective.count)
            with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
                file = Path(folder, "model.pickle")
                live.write(file)
                payload = {"file": str(file), "path": sys.path}
                return _said(check(live.source(), self.plan, payload, Kept(_code_of(self.module)), _say))
        except CannotCopyError as error:
            return _said(Checked(status="not checked", words=str(error)))
        except PlanError as error:
            return str(error)


def _copied(module: nn.Module) -> tuple[nn.Module | None, str]:
    try:
        return skeleton(module), ""
    except CannotCopyError as error:
        return None, str(error)


def _code_of(module: nn.Module) -> str:
    """Of every class in it."""
    found = []
    for kind in {type(part) for part in module.modules()}:
        try:
            found.append(inspect.getsource(inspect.getmodule(kind) or kind))
        except (OSError, TypeError):
            found.append(repr(kind))
    return stable_hash([repr(module), *sorted(found)])


def _said(found: Checked) -> Checked:
    if found.status == "not checked":
        _say(f"not checked against one process: {found.words}")
    return found


def _say(words: Any) -> None:
    print(f"meshwright: {words}", file=sys.stderr)
