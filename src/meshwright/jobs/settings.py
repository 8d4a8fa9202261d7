"""The settings of a run: its file, what the command line says, and what a resumed run keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from meshwright.core.codec import check_fields
from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.core.units import parse_bytes
from meshwright.planner.clusters import check_device
from meshwright.training.company import damages, mend
from meshwright.training.folder import RunFolder
from meshwright.training.kept import latest
from meshwright.training.lock import RunLock
from meshwright.training.places import places_of
from meshwright.training.settings import FaultSettings, Settings

DECIDING = (
    "model",
    "planner",
    "cluster",
    "hosts",
    "memory_bytes",
    "nproc",
    "device",
    "backend",
    "optimizer",
    "host_link",
)
"""Settings that a plan depends on, beside what is asked of the plan itself."""


def read_settings(
    file: str, request: PlanRequest, plan_file: str | None, given: dict[str, Any], resume: bool = False
) -> Settings:
    """The file, with what the caller says put over it. To resume, a run folder will do: it holds its settings."""
    if Path(file).is_dir() or (resume and not file.endswith(".toml")):
        file, given = _in_run_folder(file, given, resume)
    settings = load_settings(file)
    check_device(given["device"], given["backend"])
    plain = ("nproc", "steps", "out", "seed", "timeout", "find_nan", "check")
    changes = {name: value for name in plain if (value := given[name]) is not None}
    changes |= {name: given[name] for name in ("device", "backend") if given[name] != "auto"}
    if given["restarts"] is not None or given["fewer_ranks"]:
        changes["faults"] = _with_restarts(settings.faults, given["restarts"], given["fewer_ranks"])
    if (memory := given["memory"]) is not None:
        changes["memory_bytes"] = memory if isinstance(memory, int) else parse_bytes(memory)
    if plan_file is not None:
        changes["plan_file"] = plan_file
    elif settings.plan_file is not None and request != PlanRequest():
        raise InputError(
            f"{file} names a whole plan, {settings.plan_file}: leave the plan flags out, or edit that plan"
        )
    changed = msgspec.structs.replace(settings, plan=settings.plan.updated(request), **changes)
    check_fields(changed, InputError)
    return changed


def put_right(file: str, out: str | None, console: Console) -> None:
    """Damaged files beside whole checkpoints, before a run is resumed. Nothing is touched where nothing is damaged."""
    folder = RunFolder(out or (load_settings(file).folder if file.endswith(".toml") else file))
    if damages(folder):
        with RunLock(folder.path):
            mend(folder, console.print)


def load_settings(file: str) -> Settings:
    if not file.endswith(".toml"):
        raise InputError(f"{file}: settings are read from a .toml file; see examples/")
    return Settings.load(file)


def _in_run_folder(path: str, given: dict[str, Any], resume: bool) -> tuple[str, dict[str, Any]]:
    """The settings of a run, and that folder as where it goes on."""
    folder = RunFolder(path)
    if not folder.path.is_dir():
        raise InputError(f"{path}: no such run folder: give the one that --out named, or runs/NAME")
    if not folder.settings.exists():
        raise InputError(f"{path} is a folder, but not of a run: it holds no settings.toml")
    if not resume:
        raise InputError(f"{path} is the folder of a run: go on with it by --resume, or give the settings of a new one")
    if given["out"] is not None:
        raise InputError(f"a run is resumed in its own folder, {path}: leave --out away")
    return str(folder.settings), {**given, "out": path}


def with_plan_of_before(settings: Settings, world: int) -> Settings:
    """Where nothing that decides a plan has changed, the plan of before: to search again might find another."""
    folder = RunFolder(settings.folder)
    if settings.plan_file is not None or not folder.plan.exists():
        return settings
    plan, before = Plan.load(folder.plan), Settings.load(folder.settings)
    asked = before.plan.updated(PlanRequest(global_batch=plan.global_batch))
    same = all(getattr(settings, name) == getattr(before, name) for name in DECIDING) and settings.plan == asked
    return msgspec.structs.replace(settings, plan_file=str(folder.plan)) if same and plan.world == world else settings


def _with_restarts(faults: FaultSettings, restarts: int | None, fewer_ranks: bool | None) -> FaultSettings:
    changes: dict[str, Any] = {} if restarts is None else {"restarts": restarts}
    found = msgspec.structs.replace(faults, **changes, **({"ranks": "fewer"} if fewer_ranks else {}))
    check_fields(found, InputError)
    if fewer_ranks and not found.restarts:
        raise InputError("--fewer-ranks says how a run goes on after a fault, but it has no restarts: add --restarts N")
    return found


def as_before(settings: Settings) -> Settings:
    """What a resumed run must not change by itself: a global batch that nobody fixed would follow the number of ranks."""
    folder = RunFolder(settings.folder)
    if not folder.settings.exists() or latest(places_of(folder)) is None:
        raise InputError(f"{folder.path} holds no checkpoint to resume from: start it without --resume")
    settings = _where_before(settings, folder)
    if settings.plan_file is not None or settings.plan.global_batch is not None or not folder.plan.exists():
        return settings
    before = PlanRequest(global_batch=Plan.load(folder.plan).global_batch)
    return msgspec.structs.replace(settings, plan=settings.plan.updated(before))


def _where_before(settings: Settings, folder: RunFolder) -> Settings:
    """Checkpoints may lie in the second place that the run had: it keeps it, unless it is given another."""
    elsewhere = Settings.load(folder.settings).checkpoint.elsewhere
    if settings.checkpoint.elsewhere is not None or elsewhere is None:
        return settings
    return msgspec.structs.replace(
        settings, checkpoint=msgspec.structs.replace(settings.checkpoint, elsewhere=elsewhere)
    )
