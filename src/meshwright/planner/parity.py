"""A plan against one process: which model, which plan of it made small, and on how many ranks."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import msgspec
from torch import nn

from meshwright.capturing.capture import capture_source
from meshwright.core.errors import InputError, PlanError, check_number
from meshwright.core.graph import Graph
from meshwright.core.names import expand_names
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.cost.degrees import check_divides
from meshwright.measure.checking.live import LiveModel, skeleton, small_batch
from meshwright.measure.checking.small_plan import small_plan, try_sharding
from meshwright.measure.parity import ParityResult
from meshwright.measure.probe import default_num_ranks
from meshwright.models.objective import objective_of
from meshwright.models.source import resolve
from meshwright.planner.decision import check_world
from meshwright.planner.estimate import check_made_for, given_plan, name_of
from meshwright.planner.flags import PlanFlags, request_of
from meshwright.planner.graphs import graph_of
from meshwright.planner.shrunk import shrunk_plan
from meshwright.rules.limits import check_runs
from meshwright.rules.sharding import ways_by_block
from meshwright.rules.stages import check_blocks
from meshwright.runtime.launch import launch
from meshwright.runtime.watchdog import TIMEOUT_SECONDS
from meshwright.training.settings import Settings

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
    if batch is None:
        raise InputError("no batch was given: a module is run with an example of what it is called with, batch=…")
    if plan is not None:
        raise InputError(
            "a module in memory is compared under plan flags: give those, or the model by its name with plan="
        )
    if (device, backend) not in (("auto", "auto"), ("cpu", "auto"), ("cpu", "gloo")):
        raise InputError("a module in memory is compared on CPU ranks: leave device and backend out")
    check_comparison(steps, timeout)
    objective = objective_of(loss, count)
    live = LiveModel(skeleton(model), small_batch(batch), objective.loss, objective.count)
    return _compare_live(live, small_plan(live.source(), request, nproc or default_num_ranks()), steps, timeout)


def check_comparison(steps: int, timeout: float | None) -> None:
    """What ranks are told beside the plan."""
    check_number("--steps", steps)
    if timeout is not None and not timeout >= 0:
        raise InputError(f"--timeout is {timeout}: give seconds, or 0 for no limit")


@dataclass(frozen=True)
class ParityQuestion:
    """A named model and the plan that its small form runs."""

    model: str
    plan: Plan

    @classmethod
    def ask(
        cls, target: str, request: PlanRequest, plan: Plan | str | PathLike[str] | None = None, nproc: int | None = None
    ) -> ParityQuestion:
        """target: a model's name, or a settings file, whose plan the request changes."""
        model, wish = target, request
        if target.endswith(".toml"):
            settings = Settings.load(target)
            model, wish, nproc = settings.model, settings.plan.updated(request), nproc or settings.nproc
            plan = plan if plan is not None else settings.plan_file
        if plan is None:
            return cls(model, plain_plan_of_small(model, wish, nproc or default_num_ranks()))
        if request != PlanRequest():
            raise InputError(
                f"{target} names a whole plan, {name_of(plan)}: leave the plan flags out, or edit that plan"
            )
        whole, name = given_plan(plan), name_of(plan)
        check_world(whole, nproc, name)
        return cls(model, plan_of_small(model, whole, name))

    def payload(self, steps: int, device: str, backend: str, timeout: float | None) -> dict[str, Any]:
        """The payload that each rank gets."""
        check_comparison(steps, timeout)
        told = {"model": self.model, "plan": msgspec.to_builtins(self.plan), "steps": steps}
        return {**told, "device": device, "backend": backend, **({} if timeout is None else {"timeout": timeout})}

    def answer(self, payload: dict[str, Any]) -> ParityResult:
        """The comparison, by ranks that are started here."""
        return msgspec.convert(launch("meshwright.measure.parity:parity_rank", payload, self.plan.world), ParityResult)


def _compare_live(live: LiveModel, plan: Plan, steps: int, timeout: float | None) -> ParityResult:
    """The module is sent to the ranks by value, with a few of its blocks and without its weights."""
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        file = Path(folder, "model.pickle")
        live.write(file)
        told = {"file": str(file), "path": sys.path, "plan": msgspec.to_builtins(plan), "steps": steps}
        told["timeout"] = TIMEOUT_SECONDS if timeout is None else timeout
        result = launch("meshwright.measure.checking.ranks:check_rank", told, plan.world)
    if words := result.get("not_checked"):
        raise PlanError(
            f"one process does not run the module in float64 on the CPU, so there is nothing to compare with: {words}"
        )
    return msgspec.convert(result, ParityResult)


def plain_plan_of_small(model: str, request: PlanRequest, num_ranks: int) -> Plan:
    """The requested plan of the small model, with plain defaults."""
    return msgspec.structs.replace(small_plan(resolve(model).small(), request, num_ranks), model=model)


def plan_of_small(model: str, plan: Plan, file: str) -> Plan:
    """The plan of a file for the small model: its shardings, stages and recompute, applied to the small model's blocks."""
    whole = graph_of(model, plan.precision, plan.casting)
    _check_file(plan, whole, file)
    small = resolve(model).small()
    graph = capture_source(small, "fp64")
    laid = msgspec.structs.replace(shrunk_plan(plan, whole, graph), model=model, cluster="parity", precision="fp64")
    check_runs(laid)
    check_divides(graph, laid)
    tried = try_sharding(laid, small)
    _check_runs_as_written(laid, tried, graph, file)
    return tried


def _check_file(plan: Plan, whole: Graph, file: str) -> None:
    """Made for this model, of blocks and tensors that it has."""
    check_made_for(plan, whole, file)
    check_blocks(whole, plan)
    ways_by_block(plan, whole)
    check_divides(whole, plan)
    _check_sizes(plan, whole, file)


def _check_sizes(plan: Plan, whole: Graph, file: str) -> None:
    """Every run of a sharded dim divides over tp."""
    shapes = {(parameter.block, parameter.own_name): parameter.shape for parameter in whole.parameters}
    of_kind = {block.kind: block.name for block in reversed(whole.blocks)}
    for rule in plan.sharding:
        block = of_kind[rule.for_kind] if rule.for_kind else expand_names(rule.for_blocks)[0]
        for tensor in rule.tensors:
            size = shapes[block, tensor.tensor][tensor.dims.index("tp")] if "tp" in tensor.dims else 0
            if size % (tensor.runs * plan.mesh.tp):
                raise PlanError(
                    f"{file} shards a dim of size {size} of '{tensor.tensor}' of block '{block}' in {tensor.runs} runs, which does "
                    f"not divide over tp={plan.mesh.tp}: change tp, or leave that tensor whole"
                )


def _check_runs_as_written(laid: Plan, tried: Plan, graph: Graph, file: str) -> None:
    """Refuses tensors that do not run as the file says, except dims that only the small model's sizes do not divide."""
    shapes = {(parameter.block, parameter.own_name): parameter.shape for parameter in graph.parameters}
    for rule, found in zip(laid.sharding, tried.sharding, strict=True):
        block = expand_names(rule.for_blocks)[0]
        for written, runs in zip(rule.tensors, found.tensors, strict=True):
            name = f"'{written.tensor}' of block '{block}'"
            if runs.dims != written.dims:
                dim = written.dims.index("tp")
                if shapes[block, written.tensor][dim] % laid.mesh.tp == 0:
                    raise PlanError(f"{file} shards {name}, which does not run: {runs.reason}; leave that tensor whole")
            elif runs.runs != written.runs:
                raise PlanError(
                    f"{file} cuts {name} in {written.runs} runs, but the model reads it in {runs.runs}: set its runs to "
                    f"{runs.runs}"
                )
