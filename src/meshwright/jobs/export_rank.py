"""What the one rank of `meshwright export` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.core.model_name import config_file, is_config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from meshwright.core.plan import Plan
    from meshwright.runtime.ranks import Rank
    from meshwright.training.folder import RunFolder
    from meshwright.training.settings import Settings


def export_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """Put the newest checkpoint together in this process, and write it."""
    import msgspec
    import torch

    from meshwright.core.errors import ModelError
    from meshwright.models.source import resolve
    from meshwright.runtime.ranks import joined
    from meshwright.runtime.undrawn import undrawn
    from meshwright.training.export import check_exportable, check_target, export
    from meshwright.training.folder import RunFolder
    from meshwright.training.settings import Settings

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
    from functools import partial

    import torch

    from meshwright.core.graph import identity
    from meshwright.core.plan import Plan
    from meshwright.models.parameters import list_parameters
    from meshwright.runtime.apply import apply
    from meshwright.training.checkpoint import restore
    from meshwright.training.places import places_of

    graph = identity(list_parameters(module))
    optimizer = partial(torch.optim.SGD, lr=0.0)  # it keeps nothing: what the run's own kept is not read
    program = apply(module, in_one_process(Plan.load(folder.plan)), optimizer=optimizer, device=rank.device)
    return restore(program, graph, places_of(folder), rank, wanted="weights").step


def in_one_process(plan: Plan) -> Plan:
    """The model of a plan, whole, with nothing of how it was spread."""
    from meshwright.core.plan import Plan, Stage

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
    from pathlib import Path

    if settings.weights is not None:
        return Path(settings.weights)
    return config_file(settings.model).parent if is_config(settings.model) else None


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
