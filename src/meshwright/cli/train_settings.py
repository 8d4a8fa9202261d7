"""The settings of a run: its file, what the command line says, and what a resumed run keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.cli.options import PlanFlags
    from meshwright.train.settings import FaultSettings, Settings


def read_settings(file: str, flags: PlanFlags, given: dict[str, Any]) -> Settings:
    """The file, with what the command line says put over it."""
    import msgspec

    from meshwright.cli.choices import check_choice
    from meshwright.core.errors import InputError
    from meshwright.core.request import PlanRequest
    from meshwright.core.units import parse_bytes
    from meshwright.train.settings import Settings

    if not file.endswith(".toml"):
        raise InputError(f"{file}: settings are read from a .toml file; see examples/")
    settings = Settings.load(file)
    check_choice("--device", given["device"], ("auto", "cpu", "cuda"))
    check_choice("--backend", given["backend"], ("auto", "gloo", "nccl"))
    plain = ("nproc", "steps", "out", "seed", "timeout", "find_nan")
    changes = {name: value for name in plain if (value := given[name]) is not None}
    changes |= {name: given[name] for name in ("device", "backend") if given[name] != "auto"}
    if given["restarts"] is not None or given["fewer_ranks"]:
        changes["faults"] = _with_restarts(settings.faults, given["restarts"], given["fewer_ranks"])
    if given["memory"] is not None:
        changes["memory_bytes"] = parse_bytes(given["memory"])
    if flags.file is not None:
        changes["plan_file"] = flags.file
    elif settings.plan_file is not None and flags.request != PlanRequest():
        raise InputError(
            f"{file} names a whole plan, {settings.plan_file}: leave the plan flags out, or edit that plan"
        )
    return msgspec.structs.replace(settings, plan=settings.plan.updated(flags.request), **changes)


def _with_restarts(faults: FaultSettings, restarts: int | None, fewer_ranks: bool | None) -> FaultSettings:
    import msgspec

    from meshwright.core.errors import InputError

    changes: dict[str, Any] = {} if restarts is None else {"restarts": restarts}
    found = msgspec.structs.replace(faults, **changes, **({"ranks": "fewer"} if fewer_ranks else {}))
    if fewer_ranks and not found.restarts:
        raise InputError("--fewer-ranks says how a run goes on after a fault, but it has no restarts: add --restarts N")
    return found


def as_before(settings: Settings) -> Settings:
    """What a resumed run must not change by itself: a global batch that nobody fixed would follow the number of ranks."""
    import msgspec

    from meshwright.core.errors import InputError
    from meshwright.core.plan import Plan
    from meshwright.core.request import PlanRequest
    from meshwright.train.checkpoint import latest
    from meshwright.train.folder import RunFolder

    folder = RunFolder(settings.folder)
    if not folder.settings.exists() or latest(folder.checkpoints) is None:
        raise InputError(f"{folder.path} holds no checkpoint to resume from: start it without --resume")
    if settings.plan_file is not None or settings.plan.global_batch is not None or not folder.plan.exists():
        return settings
    before = PlanRequest(global_batch=Plan.load(folder.plan).global_batch)
    return msgspec.structs.replace(settings, plan=settings.plan.updated(before))
