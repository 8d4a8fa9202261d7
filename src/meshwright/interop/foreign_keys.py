"""Every key of a DeepSpeed and of an Accelerate configuration that is known: used, without effect on a plan, or not planned."""

from __future__ import annotations

from meshwright.interop.foreign import USED, Known, lacking, unneeded

_LOADING = "how checkpoints are read and written does not change a plan"
_WATCHING = "what is logged does not change a plan"
_BUFFERS = "sizes of DeepSpeed's own buffers; Meshwright's are its own"
_SCALING = "the loss scale does not change a plan"

_OFFLOAD_DETAILS = dict(
    unneeded(
        "buffer_count buffer_size max_in_cpu pin_memory pipeline pipeline_read pipeline_write fast_init super_offload "
        "cpuadam_cores_perc",
        "how DeepSpeed moves what it offloads",
    )
)
_ZERO: Known = {
    "stage": USED,
    "offload_optimizer": {"device": USED, "nvme_path": USED, "ratio": USED, **_OFFLOAD_DETAILS},
    "offload_param": {"device": USED, "nvme_path": USED, **_OFFLOAD_DETAILS},
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
DEEPSPEED: Known = {
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
    **dict(
        lacking(
            "torch_autocast", "costed in the precision that bf16 and fp16 name: give --precision where they name none"
        )
    ),
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
        **dict(
            unneeded(
                "partition seed_layers pipe_partitioned grad_partitioned use_reentrant", "stages are cut evenly here"
            )
        ),
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
            "managed_gradient_accumulation graph_harvesting",
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
    **dict(
        lacking(
            "compile", "DeepCompile is DeepSpeed's own: costed without; add --compile for torch.compile of the blocks"
        )
    ),
}

_STARTING = "how processes are started does not change a plan"
_WRAPPING = "Meshwright shards block by block, as found in the model, and gathers ahead by itself"

PARALLELISM = ["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"]
ACCELERATE: Known = {
    "distributed_type": USED,
    "num_processes": USED,
    "num_machines": USED,
    "mixed_precision": USED,
    "dynamo_backend": USED,
    "dynamo_config": {
        "dynamo_backend": USED,
        **dict(
            unneeded(
                "dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation",
                "blocks are compiled one by one",
            )
        ),
    },
    "fsdp_config": {
        "fsdp_version": USED,
        "fsdp_sharding_strategy": USED,
        "fsdp_reshard_after_forward": USED,
        "fsdp_activation_checkpointing": USED,
        "fsdp_offload_params": USED,
        **dict(
            unneeded(
                "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_backward_prefetch "
                "fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_use_orig_params fsdp_ignored_modules",
                _WRAPPING,
            )
        ),
        **dict(
            unneeded(
                "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_state_dict_type fsdp_mixed_precision_policy",
                _LOADING,
            )
        ),
    },
    "deepspeed_config": {
        "deepspeed_config_file": USED,
        "zero_stage": USED,
        "gradient_accumulation_steps": USED,
        "gradient_clipping": USED,
        "offload_optimizer_device": USED,
        "offload_param_device": USED,
        **dict(
            unneeded(
                "offload_optimizer_nvme_path offload_param_nvme_path deepspeed_multinode_launcher deepspeed_hostfile "
                "deepspeed_exclusion_filter deepspeed_inclusion_filter zero3_init_flag",
                _STARTING,
            )
        ),
        **dict(unneeded("zero3_save_16bit_model", _LOADING)),
        **dict(unneeded("deepspeed_moe_layer_cls_names", "experts are found in the model")),
    },
    "megatron_lm_config": {
        f"megatron_lm_{name}": USED
        for name in (
            "tp_degree",
            "pp_degree",
            "num_micro_batches",
            "sequence_parallelism",
            "recompute_activations",
            "gradient_clipping",
            "use_distributed_optimizer",
        )
    },
    "parallelism_config": {
        **{prefix + name: USED for name in PARALLELISM for prefix in ("", "parallelism_config_")},
        **dict(
            unneeded(
                "cp_comm_strategy parallelism_config_cp_comm_strategy parallelism_config_cp_backend parallelism_config_sp_backend "
                "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
                "parallelism_config_sp_attn_implementation",
                "context parallelism exchanges heads here",
            )
        ),
    },
    "tp_config": {"tp_size": USED},
    **dict(
        unneeded(
            "compute_environment machine_rank main_process_ip main_process_port main_training_function rdzv_backend same_network "
            "gpu_ids enable_cpu_affinity mpirun_config use_cpu debug downcast_bf16 command_file commands ipex_config "
            "use_mps_device",
            _STARTING,
        )
    ),
    **dict(unneeded("tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env", "there is no TPU in a plan")),
    **dict(lacking("fp8_config", "a plan has no 8-bit precision: costed in 16 bits")),
}
