"""`meshwright parity`: a plan against one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import (
    BackendOption,
    DeviceOption,
    JsonFlag,
    NprocOption,
    PlanFlags,
    TimeoutOption,
    plan_flags,
)

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.plan import Plan


@plan_flags
def parity(
    target: Annotated[str, typer.Argument(metavar="FILE.toml|MODEL")],
    flags: PlanFlags,
    nproc: NprocOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 5,
    timeout: TimeoutOption = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Run a plan and one process side by side, in float64 on a shrunk model: same loss, same gradients?

    Exits with 1 and the first tensor that differs. A microbatch that is not given is half of a rank's samples, so that
    accumulation is compared too. A plan file is run with its shardings, stages and recompute, on fewer blocks.
    """
    import os
    from contextlib import nullcontext

    import msgspec

    from meshwright.cli.output import make_console, print_json
    from meshwright.cli.ready import LOADED, ready_ranks
    from meshwright.core.result import describe
    from meshwright.runtime.launch import launch
    from meshwright.runtime.rank import started_by_launcher

    console, is_rank = make_console(as_json), started_by_launcher()
    with nullcontext() if is_rank else ready_ranks((*LOADED, "meshwright.measure.parity")):
        model, plan, num_ranks = _read(target, flags, int(os.environ["WORLD_SIZE"]) if is_rank else nproc)
        payload = {
            "model": model, "plan": msgspec.to_builtins(plan), "steps": steps, "device": device, "backend": backend,
        }  # fmt: skip
        payload |= {} if timeout is None else {"timeout": timeout}
        if is_rank:
            from meshwright.measure.parity import parity_rank

            result = parity_rank(payload)
            if os.environ["RANK"] != "0":
                raise typer.Exit(0 if result["ok"] else 1)
        else:
            console.print(f"{model}, shrunk: {describe(plan)}, against one process, {steps} steps", highlight=False)
            result = launch("meshwright.measure.parity:parity_rank", payload, num_ranks)
    _show(console, result)
    if as_json:
        print_json(result)
    if not result["ok"]:
        raise typer.Exit(1)


def _read(target: str, flags: PlanFlags, nproc: int | None) -> tuple[str, Plan, int]:
    """The model, the plan for it made small, and how many ranks run it."""
    from meshwright.cli.shrunk import plain_plan_of_small, plan_file_of_small
    from meshwright.core.errors import InputError, PlanError
    from meshwright.core.plan import Plan
    from meshwright.core.request import PlanRequest
    from meshwright.measure.probe import default_num_ranks
    from meshwright.training.settings import Settings

    model, request, file = target, PlanRequest(), flags.file
    if target.endswith(".toml"):
        settings = Settings.load(target)
        model, request, nproc = settings.model, settings.plan, nproc or settings.nproc
        file = file or settings.plan_file
    if file is None:
        num_ranks = nproc or default_num_ranks()
        return model, plain_plan_of_small(model, request.updated(flags.request), num_ranks), num_ranks
    if flags.request != PlanRequest():
        raise InputError(f"{target} names a whole plan, {file}: leave the plan flags out, or edit that plan")
    plan = Plan.load(file)
    if nproc not in (None, plan.world):
        raise PlanError(f"{file} is for {plan.world} ranks, but {nproc} were asked for: use --nproc {plan.world}")
    return model, plan_file_of_small(model, plan, file), plan.world


def _show(console: Console, result: dict[str, Any]) -> None:
    for step, (found, expected) in enumerate(result["losses"]):
        console.print(f"step {step}: loss {found:.12f}, one process {expected:.12f}", highlight=False)
    console.print(
        f"{result['num_tensors']} tensors; largest relative differences: loss {result['max_loss_difference']:.2e}, "
        f"gradient {result['max_gradient_difference']:.2e}, parameter {result['max_parameter_difference']:.2e}; "
        f"bound {result['bound']:.2e}",
        highlight=False,
    )
    if result["silenced"]:
        console.print(f"without randomness: {', '.join(result['silenced'])} gave their mean", highlight=False)
    console.print("parity holds" if result["ok"] else f"parity FAILS: {result['first_difference']}", highlight=False)
