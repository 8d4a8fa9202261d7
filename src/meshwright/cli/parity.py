"""`meshwright parity`: a plan against one process."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from typer import Argument, Option

from meshwright.cli import options
from meshwright.core.result import describe
from meshwright.jobs.output import make_console, print_json
from meshwright.jobs.ready import LOADED, ready_ranks
from meshwright.runtime.rank import started_by_launcher

if TYPE_CHECKING:
    from meshwright.measure.parity import ParityResult


@options.plan_flags
def parity(
    target: Annotated[str, Argument(metavar="FILE.toml|MODEL")],
    flags: options.PlanFlags,
    nproc: options.NprocOption = None,
    steps: Annotated[int, Option(help="Optimizer steps to compare.")] = 5,
    timeout: options.TimeoutOption = None,
    device: options.DeviceOption = "auto",
    backend: options.BackendOption = "auto",
    as_json: options.JsonFlag = False,
) -> None:
    """Run a plan and one process side by side, in float64 on a shrunk model: same loss, same gradients?

    Exits with 1 and the first tensor that differs. A microbatch that is not given is half of a rank's samples, so that
    accumulation is compared too. A plan file is run with its shardings, stages and recompute, on fewer blocks.
    """
    console, is_rank = make_console(as_json), started_by_launcher()
    with nullcontext() if is_rank else ready_ranks((*LOADED, "meshwright.measure.parity")):
        from meshwright.planner.parity import ParityQuestion  # brings torch

        num_ranks = int(os.environ["WORLD_SIZE"]) if is_rank else nproc
        asked = ParityQuestion.ask(target, flags.request, flags.file, num_ranks)
        payload = asked.payload(steps, device, backend, timeout)
        if is_rank:
            result = _as_a_rank(payload)
        else:
            console.print(f"{asked.model}, shrunk: {describe(asked.plan)}, against one process, {steps} steps")
            result = asked.answer(payload)
    _show(console, result)
    if as_json:
        print_json(result)
    if not result.ok:
        raise typer.Exit(1)


def _as_a_rank(payload: dict[str, Any]) -> ParityResult:
    """Started by a launcher: all compare, the first speaks."""
    from meshwright.measure.parity import ParityResult, parity_rank

    result = msgspec.convert(parity_rank(payload), ParityResult)
    if os.environ["RANK"] != "0":
        raise typer.Exit(0 if result.ok else 1)
    return result


def _show(console: Console, result: ParityResult) -> None:
    for step, (found, expected) in enumerate(result.losses):
        console.print(f"step {step}: loss {found:.12f}, one process {expected:.12f}")
    console.print(
        f"{result.num_tensors} tensors; largest relative differences: loss {result.max_loss_difference:.2e}, "
        f"gradient {result.max_gradient_difference:.2e}, parameter {result.max_parameter_difference:.2e}; "
        f"bound {result.bound:.2e}"
    )
    if result.silenced:
        console.print(f"without randomness: {', '.join(result.silenced)} gave their mean")
    console.print("parity holds" if result.ok else f"parity FAILS: {result.first_difference}")
