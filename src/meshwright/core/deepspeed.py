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

from pathlib import Path
from typing import Any

from meshwright.core.codec import load
from meshwright.core.errors import InputError
from meshwright.core.foreign import USED, Foreign, Keys, Known, lacking, unneeded
from meshwright.core.graph import Precision
from meshwright.core.plan import Offload
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest

SLOTS = {
    "adam": 2, "adamw": 2, "onebitadam": 2, "zerooneadam": 2, "lamb": 2, "onebitlamb": 2, "fusedadam": 2, "deepspeedcpuadam": 2,
    "lion": 1, "adagrad": 1, "muon": 1, "sgd": 1,
}  # fmt: skip
"""Tensors the size of a parameter that each optimizer keeps; SGD with momentum."""

_LOADING = "how checkpoints are read and written does not change a plan"
_WATCHING = "what is logged does not change a plan"
_BUFFERS = "sizes of DeepSpeed's own buffers; Meshwright's are its own"
_SCALING = "the loss scale does not change a plan"

_OFFLOAD_DETAILS = dict(
    unneeded(
        "nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline pipeline_read pipeline_write fast_init super_offload "
        "cpuadam_cores_perc",
        "how DeepSpeed moves what it offloads",
    )
)
_ZERO: Known = {
    "stage": USED,
    "offload_optimizer": {"device": USED, "ratio": USED, **_OFFLOAD_DETAILS},
    "offload_param": {"device": USED, **_OFFLOAD_DETAILS},
    "cpu_offload": USED,
    "cpu_offload_param": USED,
    "cpu_offload_params": USED,
    "mics_shard_size": USED,
    "zero_hpz_partition_size": USED,
    **dict(unneeded("mics_hierarchical_params_gather", "how a gather is routed; costs follow from the links")),
    **dict(
        unneeded(
            "allgather_bucket_size reduce_bucket_size allgather_partitions reduce_scatter overlap_comm contiguous_gradients "
            "sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters "
            "stage3_model_persistence_threshold stage3_max_reuse_distance prefetch_bucket_size param_persistence_threshold "
            "model_persistence_threshold max_live_parameters max_reuse_distance use_multi_rank_bucket_allreduce "
            "round_robin_gradients cpu_offload_use_pin_memory memory_efficient_linear stage3_module_granularity_threshold "
            "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_partition_stream_chunk_size "
            "legacy_stage1 ignore_unused_parameters override_module_apply leaf_module log_trace_cache_warnings "
            "enable_sanity_checks save_muon_momentum_buffer_in_memory",
            _BUFFERS,
        )
    ),
    **dict(
        unneeded(
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
            "gather_16bit_weights_on_model_save load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
            _LOADING,
        )
    ),
    **dict(
        lacking(
            "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param",
            "a plan sends numbers in the precision it computes in: costed without quantisation",
        )
    ),
    **dict(lacking("zenflow", "a plan updates all parameters in every step: costed so")),
}
_KNOWN: Known = {
    "train_batch_size": USED,
    "train_micro_batch_size_per_gpu": USED,
    "gradient_accumulation_steps": USED,
    "gradient_clipping": USED,
    "sequence_parallel_size": USED,
    "zero_optimization": _ZERO,
    "optimizer": {"type": USED, "params": USED, **dict(unneeded("legacy_fusion", "how the update is fused"))},
    **dict(unneeded("scheduler", "learning rates do not change a plan")),
    "fp16": {
        "enabled": USED,
        **dict(
            unneeded(
                "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale "
                "fused_mode",
                _SCALING,
            )
        ),
        **dict(lacking("fp16_master_weights_and_grads", "a plan keeps parameters and gradients in fp32: costed so")),
    },
    "bf16": {
        "enabled": USED,
        **dict(unneeded("immediate_grad_update check_grad_overflow", "when gradients are handed on inside a step")),
        **dict(
            lacking("bf16_master_weights_and_grads bf16_optimizer_states", "a plan keeps its state in fp32: costed so")
        ),
    },
    "bfloat16": {"enabled": USED},
    "amp": {"enabled": USED, **dict(unneeded("opt_level loss_scale", _SCALING))},
    "tensor_parallel": {
        "autotp_size": USED,
        "tp_size": USED,
        **dict(
            unneeded(
                "tp_grain_size tp tp_overlap_comm partition_config preset_model keep_module_on_host",
                "which weights are cut is found by trying the model",
            )
        ),
    },
    "pipeline": {
        "stages": USED,
        "activation_checkpoint_interval": USED,
        **dict(unneeded("partition seed_layers pipe_partitioned grad_partitioned use_reentrant", "stages are cut evenly here")),
    },
    **dict(
        unneeded(
            "activation_checkpointing",
            "it says how, not whether, blocks recompute; the model's code does: give --recompute full where it does",
        )
    ),
    **dict(
        unneeded(
            "steps_per_print wall_clock_breakdown memory_breakdown dump_state comms_logger flops_profiler tensorboard wandb "
            "csv_monitor comet monitor_config timers log_level autotuning",
            _WATCHING,
        )
    ),
    **dict(unneeded("checkpoint load_universal_checkpoint use_node_local_storage nebula datastates_ckpt", _LOADING)),
    **dict(unneeded("aio", "how files are read")),
    **dict(
        unneeded(
            "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last vocabulary_size hybrid_engine "
            "use_data_before_expert_parallelism prescale_gradients gradient_predivide_factor disable_allgather "
            "managed_gradient_accumulation graph_harvesting torch_autocast",
            "it does not change a plan",
        )
    ),
    **dict(
        unneeded(
            "communication_data_type seq_parallel_comm_data_type data_types",
            "gradients are added up in fp32 here",
        )
    ),
    **dict(
        lacking(
            "sparse_gradients sparse_attention compression_training quantize_training weight_quantization "
            "progressive_layer_drop eigenvalue curriculum_learning data_efficiency elasticity",
            "a plan is for one model with one batch size, computed as it is written: costed without",
        )
    ),
    **dict(lacking("compile", "DeepCompile is DeepSpeed's own: costed without; add --compile for torch.compile of the blocks")),
}


def load_deepspeed(path: str) -> Foreign:
    """Read a DeepSpeed JSON file."""
    if Path(path).suffix != ".json":
        raise InputError(f"{path}: a DeepSpeed configuration is a .json file")
    return read_deepspeed(load(path, dict[str, Any]), path)


def read_deepspeed(raw: dict[str, Any], where: str) -> Foreign:
    keys = Keys(raw, _KNOWN, where)
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
    pp = keys.values.get("pipeline.stages")
    interval = keys.number("pipeline.activation_checkpoint_interval", least=0)
    return PlanRequest(
        global_batch=keys.number("train_batch_size"),
        microbatch=keys.number("train_micro_batch_size_per_gpu"),
        tp=keys.number("tensor_parallel.autotp_size", least=0) or keys.number("tensor_parallel.tp_size") or 1,
        pp=1 if pp in (None, "auto") else keys.number("pipeline.stages"),
        cp=keys.number("sequence_parallel_size") or 1,
        zero=0 if zero is None else zero,  # type: ignore[arg-type]
        hybrid=_sharding_group(keys, zero or 0),
        precision=_precision(keys),
        recompute="full" if interval else None,
    )


def _precision(keys: Keys) -> Precision | None:
    """None where both are left to the script by `auto`."""
    if keys.switch("amp.enabled"):
        raise InputError(f"{keys.where}: amp.enabled: Apex's mixed precision has no counterpart: use bf16 or fp16 instead")
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
    where = "disk" if "nvme" in (parameters, optimizer) else "host"
    ratio = keys.share("zero_optimization.offload_optimizer.ratio")
    if ratio is not None and ratio > 1:
        raise InputError(f"{keys.where}: zero_optimization.offload_optimizer.ratio is {ratio}: give a share of 0 to 1")
    if parameters != "none":
        return Offload(what="parameters", where=where)
    return Offload(what="optimizer", where=where, share=1.0 if ratio is None else ratio)


def _recipe(keys: Keys) -> tuple[Recipe, list[str]]:
    """What the optimizer keeps, and what could not be told."""
    parameters = keys.values.get("optimizer.params")
    parameters = parameters if isinstance(parameters, dict) else {}
    clips = bool(keys.share("gradient_clipping") or parameters.get("max_grad_norm"))
    name = str(keys.values.get("optimizer.type", "AdamW"))
    slots = SLOTS.get(name.casefold().replace("_", ""))
    if slots is None:
        return Recipe(clips=clips), [f"optimizer.type: what '{name}' keeps is not known: costed as AdamW"]
    if name.casefold() == "sgd" and not parameters.get("momentum"):
        slots = 0
    return Recipe(clips=clips, optimizer_slots=slots, optimizer_scalar_bytes=4 if slots == 2 else 0), []
