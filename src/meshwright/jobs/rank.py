"""What ranks run that a verb has started: `train`, another library in `compare --with`, and the one rank of `export`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from torch import nn

from meshwright.core.errors import ModelError
from meshwright.core.graph import identity
from meshwright.core.model_name import config_file, is_config
from meshwright.core.plan import Plan, Stage
from meshwright.jobs.output import make_run_console
from meshwright.measure.record import StepRecorder
from meshwright.models.parameters import list_parameters
from meshwright.models.source import resolve
from meshwright.runtime.apply import apply
from meshwright.runtime.ranks import Rank, joined
from meshwright.runtime.undrawn import undrawn
from meshwright.training.checkpoint import restore
from meshwright.training.export import check_exportable, check_target, export
from meshwright.training.folder import RunFolder
from meshwright.training.job import Job
from meshwright.training.peer_loop import run_peer
from meshwright.training.places import places_of
from meshwright.training.run import run
from meshwright.training.run_id import check_still_ours, read_id
from meshwright.training.settings import Settings


def make_payload(
    folder: Path, console: Console, as_json: bool, *, resume: bool, verify: bool, quiet: bool = False
) -> dict[str, Any]:
    """What a rank is told; all else is in the run folder."""
    return {
        "folder": str(folder), "run": read_id(folder), "resume": resume, "verify": verify, "as_json": as_json, "quiet": quiet,
        "terminal": console.is_terminal,
    }  # fmt: skip


def train_rank(payload: dict[str, Any]) -> dict[str, Any]:
    folder = RunFolder(payload["folder"])
    settings = Settings.load(folder.settings)
    with joined(settings.device, settings.backend, settings.timeout, folder.hang) as rank:
        return run_rank(payload, rank)


def run_rank(payload: dict[str, Any], rank: Rank) -> dict[str, Any]:
    """In a rank that has joined the others; returns what the launcher needs of the outcome."""
    folder, run_id = RunFolder(payload["folder"]), payload["run"]
    check_still_ours(folder.path, run_id)
    settings, plan = Settings.load(folder.settings), Plan.load(folder.plan)
    job = Job(settings, plan, folder, payload["resume"], payload["verify"], run_id)
    console = make_run_console(payload["as_json"], quiet=payload["quiet"], force_terminal=payload["terminal"] or None)
    outcome = run(job, rank, StepRecorder(), console)
    told = ("loss", "validation_loss", "num_steps", "stopped")
    return {**{name: getattr(outcome, name) for name in told}, "checkpoint": str(outcome.checkpoint)}


def peer_rank(payload: dict[str, Any]) -> dict[str, Any]:
    folder = RunFolder(payload["folder"])
    settings = Settings.load(folder.settings)
    with joined(settings.device, settings.backend, settings.timeout) as rank:
        run_peer(payload["peer"], settings, Plan.load(folder.plan), folder, rank)
    return {}


def export_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """Put the newest checkpoint together in this process, and write it."""
    folder, target = RunFolder(payload["run"]), Path(payload["folder"])
    settings = Settings.load(folder.settings)
    check_target(target)
    source = resolve(settings.model)
    with undrawn():
        module = source.build()
    check_exportable(module, settings.model)
    if source.example is None:
        raise ModelError(
            f"{source.name} returned a module alone: return (module, batch) so that outputs can be compared"
        )
    with joined("cpu", "gloo") as rank:
        step = _restore(module, folder, rank)
        trained = _word(next(module.parameters()).dtype)
        dtype = None if payload["dtype"] == "trained" else getattr(torch, payload["dtype"])
        found = export(module, source.example(1), target, dtype, payload["shard_bytes"], _beside(settings))
    written = _word(next(module.parameters()).dtype)
    said = trained if written == trained else f"{trained} rounded to {written}"
    return {**msgspec.to_builtins(found, enc_hook=str), "step": step, "dtypes": said}


def _restore(module: nn.Module, folder: RunFolder, rank: Rank) -> int:
    """The module's parameters and buffers become those of the newest checkpoint; returns its step."""
    graph = identity(list_parameters(module))
    optimizer = partial(torch.optim.SGD, lr=0.0)  # it keeps nothing: what the run's own kept is not read
    program = apply(module, in_one_process(Plan.load(folder.plan)), optimizer=optimizer, device=rank.device)
    return restore(program, graph, places_of(folder), rank, wanted="weights").step


def in_one_process(plan: Plan) -> Plan:
    """The model of a plan, whole, with nothing of how it was spread."""
    return Plan(
        model=plan.model,
        graph=plan.graph,
        stages=(Stage(coordinate=0, blocks=plan.blocks),),
        microbatch=1,
        num_microbatches=1,
        global_batch=1,
        precision="fp64" if plan.precision == "fp64" else "fp32",
    )


def _beside(settings: Settings) -> Path | None:
    """Where the tokenizer may be."""
    if settings.weights is not None:
        return Path(settings.weights)
    return config_file(settings.model).parent if is_config(settings.model) else None


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
