"""A plan against one process: which model, which plan of it made small, and on how many ranks."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from meshwright.core.errors import InputError, PlanError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.planner.flags import PlanFlags, request_of
from meshwright.planner.parity_plan import plain_plan_of_small, plan_of_small

if TYPE_CHECKING:
    from torch import nn

    from meshwright.measure.parity import ParityResult

STEPS = 5


def parity(
    model: str | nn.Module,
    *,
    plan: Plan | str | PathLike[str] | None = None,
    batch: Any = None,
    loss: Any = None,
    count: Any = None,
    nproc: int | None = None,
    steps: int = STEPS,
    device: str = "auto",
    backend: str = "auto",
    timeout: float | None = None,
    **flags: Unpack[PlanFlags],
) -> ParityResult:
    """Whether a plan does what one process does: in float64, on a small copy of the model, as `meshwright parity` compares them.

        mw.parity("llama", nproc=4, tp=2, zero=3).ok
        mw.parity(module, batch=(inputs, labels), nproc=2, pp=2).first_difference

    model: a name, a settings file (.toml), or a module with batch=, whose loss and count are as for `mw.capture`. plan: a whole
    plan, as a value or a file; without it, plan flags as keywords (as of `mw.plan`) with plain defaults for the rest. nproc: how
    many ranks are started on this host. steps: optimizer steps to compare.
    """
    request = request_of(flags, parity)
    if isinstance(model, str):
        if batch is not None or loss is not None or count is not None:
            raise InputError("batch, loss and count go with a module; a model's name has its own")
        asked = ParityQuestion.ask(model, request, plan, nproc)
        return asked.answer(asked.payload(steps, device, backend, timeout))
    return _of_module(model, request, plan, (batch, loss, count), nproc, (steps, device, backend, timeout))


@dataclass(frozen=True)
class ParityQuestion:
    """A named model and the plan that its small form runs."""

    model: str
    plan: Plan
    num_ranks: int

    @classmethod
    def ask(
        cls, target: str, request: PlanRequest, plan: Plan | str | PathLike[str] | None = None, nproc: int | None = None
    ) -> ParityQuestion:
        """target: a model's name, or a settings file, whose plan the request changes."""
        from meshwright.training.settings import Settings

        model, wish = target, request
        if target.endswith(".toml"):
            settings = Settings.load(target)
            model, wish, nproc = settings.model, settings.plan.updated(request), nproc or settings.nproc
            plan = plan if plan is not None else settings.plan_file
        if plan is None:
            num_ranks = _num_ranks(nproc)
            return cls(model, plain_plan_of_small(model, wish, num_ranks), num_ranks)
        name = "the plan" if isinstance(plan, Plan) else fspath(plan)
        if request != PlanRequest():
            raise InputError(f"{target} names a whole plan, {name}: leave the plan flags out, or edit that plan")
        whole = plan if isinstance(plan, Plan) else Plan.load(plan)
        if nproc not in (None, whole.world):
            raise PlanError(f"{name} is for {whole.world} ranks, but {nproc} were asked for: use --nproc {whole.world}")
        return cls(model, plan_of_small(model, whole, name), whole.world)

    def payload(self, steps: int, device: str, backend: str, timeout: float | None) -> dict[str, Any]:
        """What each rank is told."""
        told = {"model": self.model, "plan": msgspec.to_builtins(self.plan), "steps": steps}
        return {**told, "device": device, "backend": backend, **({} if timeout is None else {"timeout": timeout})}

    def answer(self, payload: dict[str, Any]) -> ParityResult:
        """Of ranks that are started here."""
        from meshwright.measure.parity import ParityResult
        from meshwright.runtime.launch import launch

        return msgspec.convert(launch("meshwright.measure.parity:parity_rank", payload, self.num_ranks), ParityResult)


def _of_module(
    module: nn.Module,
    request: PlanRequest,
    plan: Plan | str | PathLike[str] | None,
    example: tuple[Any, Any, Any],
    nproc: int | None,
    how: tuple[int, str, str, float | None],
) -> ParityResult:
    """The module is sent to the ranks by value, with a few of its blocks and without its weights."""
    from meshwright.measure.checking.live import LiveModel, skeleton, small_batch
    from meshwright.measure.checking.small_plan import small_plan
    from meshwright.measure.parity import ParityResult
    from meshwright.models.objective import objective_of
    from meshwright.runtime.launch import launch
    from meshwright.runtime.watchdog import TIMEOUT_SECONDS

    batch, loss, count = example
    steps, device, backend, timeout = how
    if batch is None:
        raise InputError("no batch was given: a module is run with an example of what it is called with, batch=…")
    if plan is not None:
        raise InputError(
            "a module in memory is compared under plan flags: give those, or the model by its name with plan="
        )
    if (device, backend) not in (("auto", "auto"), ("cpu", "auto"), ("cpu", "gloo")):
        raise InputError("a module in memory is compared on CPU ranks: leave device and backend out")
    objective = objective_of(loss, count)
    live = LiveModel(skeleton(module), small_batch(batch), objective.loss, objective.count)
    num_ranks = _num_ranks(nproc)
    small = small_plan(live.source(), request, num_ranks)
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-")), "model.pickle")
        live.write(file)
        told = {"file": str(file), "path": sys.path, "plan": msgspec.to_builtins(small), "steps": steps}
        told["timeout"] = TIMEOUT_SECONDS if timeout is None else timeout
        result = launch("meshwright.measure.checking.ranks:check_rank", told, num_ranks)
    if words := result.get("not_checked"):
        raise PlanError(
            f"one process does not run the module in float64 on the CPU, so there is nothing to compare with: {words}"
        )
    return msgspec.convert(result, ParityResult)


def _num_ranks(nproc: int | None) -> int:
    from meshwright.measure.probe import default_num_ranks

    return nproc or default_num_ranks()
