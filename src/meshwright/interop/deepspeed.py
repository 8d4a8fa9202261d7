"""A DeepSpeed configuration as a plan.

train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps      global batch, microbatch, their number
zero_optimization.stage                                                            ZeRO stage
zero_optimization.offload_optimizer, offload_param                                 offload, its place and share
zero_optimization.mics_shard_size                                                  hybrid: state is sharded in such groups
bf16, fp16                                                                         precision
tensor_parallel.autotp_size, pipeline.stages, sequence_parallel_size               tp, pp, cp
pipeline.activation_checkpoint_interval                                            full recompute
optimizer.type, gradient_clipping                                                  what the optimizer keeps, clipping
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.core.codec import load
from meshwright.core.errors import InputError
from meshwright.core.graph import Precision
from meshwright.core.plan import Offload
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.interop.foreign import Foreign, Keys
from meshwright.interop.foreign_keys import known_keys


@dataclass(frozen=True)
class _Kept:
    slots: int
    """Tensors the size of a parameter that an optimizer keeps; SGD's with momentum."""
    lacks: str = ""
    """A feature of the optimizer that a plan does not have."""


_ONE_BIT = "sends its updates in 1 bit and keeps the rounding errors: costed as Adam, with whole gradients"
_LAMB = "scales every tensor's update by two norms over all ranks: costed as Adam, without them"
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam"), _Kept(2)),
    **dict.fromkeys(("onebitadam", "zerooneadam"), _Kept(2, _ONE_BIT)),
    "onebitlamb": _Kept(2, f"{_ONE_BIT}, and without Lamb's norms"),
    **dict.fromkeys(("lamb", "fusedlamb"), _Kept(2, _LAMB)),
    **dict.fromkeys(
        ("lion", "fusedlion", "deepspeedcpulion"), _Kept(1, "is not in torch.optim: costed by what it keeps")
    ),
    "muon": _Kept(1, "makes the updates of matrices orthogonal: costed without these products"),
    **dict.fromkeys(("adagrad", "deepspeedcpuadagrad", "sgd"), _Kept(1)),
}


DEFAULT_NVME_FOLDER = "/local_nvme"
"""DeepSpeed's default folder for state on disk."""


def load_deepspeed(path: str) -> Foreign:
    """Read a DeepSpeed JSON file."""
    if Path(path).suffix != ".json":
        raise InputError(f"{path}: a DeepSpeed configuration is a .json file")
    return read_deepspeed(load(path, dict[str, Any]), path)


def read_deepspeed(raw: dict[str, Any], where: str) -> Foreign:
    keys = Keys(raw, known_keys("deepspeed"), where)
    zero = keys.number("zero_optimization.stage", least=0)
    offload = _offload(keys, zero or 0)
    not_planned = list(keys.not_planned)
    if (keys.number("zero_optimization.zero_hpz_partition_size", least=0) or 1) > 1:
        not_planned.append(
            "zero_optimization.zero_hpz_partition_size: a plan gathers parameters over all ranks that shard them: costed "
            "without a second copy; --hybrid shards all state in groups"
        )
    if offload.what == "parameters" and _place(keys, "optimizer") == "none":
        not_planned.append(
            "zero_optimization.offload_param: a plan that keeps parameters on the host keeps the optimizer's state there too: "
            "costed so"
        )
    recipe, noted = _recipe(keys)
    return Foreign(
        where=where,
        request=_request(keys, zero),
        num_microbatches=keys.number("gradient_accumulation_steps"),
        offload=offload,
        recipe=recipe,
        without_effect=tuple(keys.without_effect),
        not_planned=(*not_planned, *noted),
    )


def _request(keys: Keys, zero: int | None) -> PlanRequest:
    if zero is not None and zero > 3:
        raise InputError(f"{keys.where}: zero_optimization.stage is {zero}: give 0, 1, 2 or 3")
    interval = keys.number("pipeline.activation_checkpoint_interval", least=0)
    return PlanRequest(
        global_batch=keys.number("train_batch_size"),
        microbatch=keys.number("train_micro_batch_size_per_gpu"),
        tp=keys.number("tensor_parallel.autotp_size", least=0) or keys.number("tensor_parallel.tp_size"),
        pp=keys.number("pipeline.stages"),
        cp=keys.number("sequence_parallel_size"),
        zero=0 if zero is None else zero,  # type: ignore[arg-type]
        hybrid=_sharding_group(keys, zero or 0),
        precision=_precision(keys),
        recompute="full" if interval else None,
    )


def _precision(keys: Keys) -> Precision | None:
    """None where both are left to the script by `auto`."""
    if keys.switch("amp.enabled"):
        raise InputError(
            f"{keys.where}: amp.enabled: Apex's mixed precision has no counterpart: use bf16 or fp16 instead"
        )
    half = keys.switch("fp16.enabled")
    brain = keys.switch("bf16.enabled") or keys.switch("bfloat16.enabled")
    if half and brain:
        raise InputError(f"{keys.where}: fp16.enabled and bf16.enabled are both true: keep one of them")
    if half or brain:
        return "fp16" if half else "bf16"
    return None if "auto" in (keys.values.get("fp16.enabled"), keys.values.get("bf16.enabled")) else "fp32"


def _sharding_group(keys: Keys, zero: int) -> int | None:
    size = keys.values.get("zero_optimization.mics_shard_size")
    if size in (None, -1, 0):
        return None
    if zero != 3:
        raise InputError(f"{keys.where}: zero_optimization.mics_shard_size needs stage 3, but stage is {zero}")
    return keys.number("zero_optimization.mics_shard_size")


def _place(keys: Keys, what: str) -> str:
    """Where parameters (`param`) or optimizer state (`optimizer`) are kept: none, cpu or nvme."""
    older = {"optimizer": ("cpu_offload",), "param": ("cpu_offload_param", "cpu_offload_params")}
    if any(keys.switch(f"zero_optimization.{name}") for name in older[what]):
        return "cpu"
    return keys.word(f"zero_optimization.offload_{what}.device", ("none", "cpu", "nvme")) or "none"


def _offload(keys: Keys, zero: int) -> Offload:
    parameters, optimizer = _place(keys, "param"), _place(keys, "optimizer")
    if parameters != "none" and zero != 3:
        raise InputError(f"{keys.where}: zero_optimization.offload_param needs stage 3, but stage is {zero}")
    if optimizer != "none" and zero == 0:
        raise InputError(f"{keys.where}: zero_optimization.offload_optimizer needs stage 1, 2 or 3, but stage is 0")
    if parameters == optimizer == "none":
        return Offload()
    where: Literal["host", "disk"] = "disk" if "nvme" in (parameters, optimizer) else "host"
    folder = _nvme_folder(keys, "param" if parameters == "nvme" else "optimizer") if where == "disk" else ""
    ratio = keys.share("zero_optimization.offload_optimizer.ratio")
    if ratio is not None and ratio > 1:
        raise InputError(f"{keys.where}: zero_optimization.offload_optimizer.ratio is {ratio}: give a share of 0 to 1")
    if parameters != "none":
        return Offload(what="parameters", where=where, folder=folder)
    return Offload(what="optimizer", where=where, folder=folder, share=1.0 if ratio is None else ratio)


def _nvme_folder(keys: Keys, what: str) -> str:
    return str(keys.values.get(f"zero_optimization.offload_{what}.nvme_path") or DEFAULT_NVME_FOLDER)


def _recipe(keys: Keys) -> tuple[Recipe, list[str]]:
    """The recipe of the optimizer, and remarks on what is costed otherwise."""
    parameters = keys.values.get("optimizer.params")
    parameters = parameters if isinstance(parameters, dict) else {}
    clips = bool(keys.share("gradient_clipping") or parameters.get("max_grad_norm"))
    name = str(keys.values.get("optimizer.type", "AdamW"))
    kept = OPTIMIZERS.get(name.casefold().replace("_", ""))
    if kept is None:
        return Recipe(clips=clips), [f"optimizer.type: what '{name}' keeps is not known: costed as AdamW"]
    slots = 0 if name.casefold() == "sgd" and not parameters.get("momentum") else kept.slots
    noted = [f"optimizer.type: '{name}' {kept.lacks}"] if kept.lacks else []
    return Recipe(clips=clips, optimizer_slots=slots, optimizer_scalar_bytes=4 if slots == 2 else 0), noted
