"""Options that several verbs share. The plan flags are the same everywhere: `@plan_flags` adds them to a verb."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typer import Option

from meshwright.core.axes import AXES, AxisKind
from meshwright.core.codec import decode
from meshwright.core.errors import InputError
from meshwright.core.pipeline.kinds import KINDS
from meshwright.core.request import PlanRequest

JsonFlag = Annotated[
    bool, Option("--json", help="Print one JSON object on standard output, all else on standard error.")
]
ClusterOption = Annotated[str, Option("--cluster", help="A cluster's name, a .json or .toml file, or 'local'.")]
HostsOption = Annotated[int | None, Option("--hosts", help="Number of hosts. Default: one, or what the file says.")]
MemoryOption = Annotated[str | None, Option("--memory", help="Budget per device, like 72GiB. Default: all of it.")]
NprocOption = Annotated[int | None, Option("--nproc", help="Local ranks. Default: one per GPU, or per core.")]
DeviceOption = Annotated[str, Option("--device", help="auto, cpu or cuda.")]
BackendOption = Annotated[str, Option("--backend", help="auto, gloo or nccl. gloo lets ranks share a GPU.")]
SearchOption = Annotated[str, Option("--search", help="Which method searches.")]
PreferFastestFlag = Annotated[
    bool,
    Option(
        "--prefer-fastest",
        help="Take the fastest plan even where a simpler one is as fast within the estimate's error.",
    ),
]
SeedOption = Annotated[int | None, Option("--seed")]
TimeoutOption = Annotated[
    float | None,
    Option(
        "--timeout",
        min=0,
        help="Seconds a rank may wait for another before the run ends and says which hangs. Default: 600; 0: no limit.",
    ),
]


def _axis_words(kind: AxisKind) -> str:
    divides = f"; divides {kind.inside}" if kind.inside else ""
    return f"{kind.title.capitalize()}-parallel ranks{divides}."


_WORDS = {
    **{str(axis): _axis_words(kind) for axis, kind in AXES.items()},
    "virtual": "Stages on each pipeline rank.",
    "zero": "ZeRO stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.",
    "hybrid": "Ranks in one sharding group of ZeRO.",
    "microbatch": "Samples per microbatch per data-parallel rank.",
    "global_batch": "Samples per optimizer step.",
    "context": "heads or ring: how attention is done over context-parallel ranks.",
    "schedule": f"{', '.join(KINDS)}: the order of forwards and backwards over pp.",
    "ends": (
        "even, fewer or own: where pipeline stages put the embedding and the head. even: with an even share of the blocks. "
        "fewer: each counts as a block, so the first and the last stage hold a block less. own: in stages of their own."
    ),
    "recompute": "none, selective, full or every:K.",
    "precision": "fp64, fp32, bf16 or fp16.",
    "offload": "none, optimizer or parameters.",
    "offload_moments": "fp32 or bf16: what Adam's moments are kept in on the host.",
    "offload_share": "Share of the optimizer state that is offloaded, 0 to 1.",
    "no_offload": "Keep everything on the devices: --offload none.",
    "sequence_parallel": "Shard activations along the sequence between tensor-parallel regions.",
    "offload_delayed": "Let updates on the host be a step late.",
    "compile": "Compile the blocks.",
    "sync_batch_norm": "Batch norm over the samples of all data-parallel ranks.",
}


@dataclass(frozen=True)
class PlanFlags:
    """The plan flags of a command line: single parts, or a whole plan file."""

    request: PlanRequest
    file: str | None


def plan_flags(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add the plan flags to a verb; it receives them as `flags: PlanFlags`."""
    kinds = get_type_hints(verb, include_extras=True)
    own = [
        p.replace(annotation=kinds[name]) for name, p in inspect.signature(verb).parameters.items() if name != "flags"
    ]
    added = [p for p in _parameters() if p.name not in kinds]

    @wraps(verb)
    def run(**given: Any) -> Any:
        file = given.pop("plan_file")
        no_offload = given.pop("no_offload")
        fixed = {p.name: value for p in added if p.name in given and (value := given.pop(p.name)) is not None}
        if no_offload and fixed.setdefault("offload", "none") != "none":
            raise InputError(f"--no-offload and --offload {fixed['offload']} contradict each other: leave one out")
        request = decode(fixed, PlanRequest, "plan flags")
        if file is not None and fixed:
            raise InputError("--plan gives a whole plan: leave the other plan flags out, or edit the file")
        return verb(**given, flags=PlanFlags(request, file))

    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
    return run


def _parameters() -> list[inspect.Parameter]:
    plan_file = _parameter("plan_file", str, "--plan", "A whole plan, as .json or .toml; then no other plan flag.")
    return [plan_file, *(_parameter(name, kind := _kind(name), _flag(name, kind), _WORDS[name]) for name in _WORDS)]


def _kind(name: str) -> type:
    """The type of a request's field; `no_offload` is the only flag that is no field."""
    kinds = get_args(get_type_hints(PlanRequest).get(name, bool | None))
    return type(get_args(kinds[0])[0]) if get_origin(kinds[0]) is Literal else kinds[0]


def _flag(name: str, kind: type) -> str:
    words = name.replace("_", "-")
    return f"--{words}/--no-{words}" if kind is bool and name != "no_offload" else f"--{words}"


def _parameter(name: str, kind: type, flag: str, words: str) -> inspect.Parameter:
    option = Option(flag, help=words, rich_help_panel="Plan flags", show_default=False)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
