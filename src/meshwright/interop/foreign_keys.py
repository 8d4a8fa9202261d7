"""Every key of a DeepSpeed and of an Accelerate configuration that is known: used, without effect on a plan, or not planned."""

from __future__ import annotations

from meshwright.interop.foreign import Known, lacking, unneeded, used

_LOADING = "how checkpoints are read and written does not change a plan"
_WATCHING = "what is logged does not change a plan"
_BUFFERS = "sizes of DeepSpeed's own buffers; Meshwright's are its own"
_SCALING = "the loss scale does not change a plan"

_OFFLOAD_DETAILS = unneeded(
    "buffer_count buffer_size max_in_cpu pin_memory pipeline pipeline_read pipeline_write fast_init super_offload "
    "cpuadam_cores_perc",
    "how DeepSpeed moves what it offloads",
)
_ZERO: Known = {
    **used("stage"),
    "offload_optimizer": {**used("device nvme_path ratio"), **_OFFLOAD_DETAILS},
    "offload_param": {**used("device nvme_path"), **_OFFLOAD_DETAILS},
    **used("cpu_offload cpu_offload_param cpu_offload_params mics_shard_size zero_hpz_partition_size"),
    **unneeded("mics_hierarchical_params_gather", "how a gather is routed; costs follow from the links"),
    **unneeded(
        "allgather_bucket_size reduce_bucket_size allgather_partitions reduce_scatter overlap_comm contiguous_gradients "
        "sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters "
        "stage3_model_persistence_threshold stage3_max_reuse_distance prefetch_bucket_size param_persistence_threshold "
        "model_persistence_threshold max_live_parameters max_reuse_distance use_multi_rank_bucket_allreduce "
        "round_robin_gradients cpu_offload_use_pin_memory memory_efficient_linear stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_partition_stream_chunk_size "
        "legacy_stage1 ignore_unused_parameters override_module_apply leaf_module log_trace_cache_warnings "
        "enable_sanity_checks save_muon_momentum_buffer_in_memory",
        _BUFFERS,
    ),
    **unneeded(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
        _LOADING,
    ),
    **lacking(
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param",
        "a plan sends numbers in the precision it computes in: costed without quantisation",
    ),
    **lacking("zenflow", "a plan updates all parameters in every step: costed so"),
}
DEEPSPEED: Known = {
    **used(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
        "sequence_parallel_size"
    ),
    "zero_optimization": _ZERO,
    "optimizer": {**used("type params"), **unneeded("legacy_fusion", "how the update is fused")},
    **unneeded("scheduler", "learning rates do not change a plan"),
    "fp16": {
        **used("enabled"),
        **unneeded(
            "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale "
            "fused_mode",
            _SCALING,
        ),
        **lacking("fp16_master_weights_and_grads", "a plan keeps parameters and gradients in fp32: costed so"),
    },
    "bf16": {
        **used("enabled"),
        **unneeded("immediate_grad_update check_grad_overflow", "when gradients are handed on inside a step"),
        **lacking("bf16_master_weights_and_grads bf16_optimizer_states", "a plan keeps its state in fp32: costed so"),
    },
    "bfloat16": used("enabled"),
    **lacking(
        "torch_autocast", "costed in the precision that bf16 and fp16 name: give --precision where they name none"
    ),
    "amp": {**used("enabled"), **unneeded("opt_level loss_scale", _SCALING)},
    "tensor_parallel": {
        **used("autotp_size tp_size"),
        **unneeded(
            "tp_grain_size tp tp_overlap_comm partition_config preset_model keep_module_on_host",
            "which weights are cut is found by trying the model",
        ),
    },
    "pipeline": {
        **used("stages activation_checkpoint_interval"),
        **unneeded(
            "partition seed_layers pipe_partitioned grad_partitioned use_reentrant", "stages are cut evenly here"
        ),
    },
    **unneeded(
        "activation_checkpointing",
        "it says how, not whether, blocks recompute; the model's code does: give --recompute full where it does",
    ),
    **unneeded(
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state comms_logger flops_profiler tensorboard wandb "
        "csv_monitor comet monitor_config timers log_level autotuning",
        _WATCHING,
    ),
    **unneeded("checkpoint load_universal_checkpoint use_node_local_storage nebula datastates_ckpt", _LOADING),
    **unneeded("aio", "how files are read"),
    **unneeded(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last vocabulary_size hybrid_engine "
        "use_data_before_expert_parallelism prescale_gradients gradient_predivide_factor disable_allgather "
        "managed_gradient_accumulation graph_harvesting",
        "it does not change a plan",
    ),
    **unneeded("communication_data_type seq_parallel_comm_data_type data_types", "gradients are added up in fp32 here"),
    **lacking(
        "sparse_gradients sparse_attention compression_training quantize_training weight_quantization "
        "progressive_layer_drop eigenvalue curriculum_learning data_efficiency elasticity",
        "a plan is for one model with one batch size, computed as it is written: costed without",
    ),
    **lacking(
        "compile", "DeepCompile is DeepSpeed's own: costed without; add --compile for torch.compile of the blocks"
    ),
}

_STARTING = "how processes are started does not change a plan"
_WRAPPING = "Meshwright shards block by block, as found in the model, and gathers ahead by itself"

PARALLELISM = ["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"]
ACCELERATE: Known = {
    **used("distributed_type num_processes num_machines mixed_precision dynamo_backend"),
    "dynamo_config": {
        **used("dynamo_backend"),
        **unneeded(
            "dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation",
            "blocks are compiled one by one",
        ),
    },
    "fsdp_config": {
        **used(
            "fsdp_version fsdp_sharding_strategy fsdp_reshard_after_forward "
            "fsdp_activation_checkpointing fsdp_offload_params"
        ),
        **unneeded(
            "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_backward_prefetch "
            "fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_use_orig_params fsdp_ignored_modules",
            _WRAPPING,
        ),
        **unneeded(
            "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_state_dict_type fsdp_mixed_precision_policy",
            _LOADING,
        ),
    },
    "deepspeed_config": {
        **used(
            "deepspeed_config_file zero_stage gradient_accumulation_steps gradient_clipping "
            "offload_optimizer_device offload_param_device"
        ),
        **unneeded(
            "offload_optimizer_nvme_path offload_param_nvme_path deepspeed_multinode_launcher deepspeed_hostfile "
            "deepspeed_exclusion_filter deepspeed_inclusion_filter zero3_init_flag",
            _STARTING,
        ),
        **unneeded("zero3_save_16bit_model", _LOADING),
        **unneeded("deepspeed_moe_layer_cls_names", "experts are found in the model"),
    },
    "megatron_lm_config": used(
        "megatron_lm_tp_degree megatron_lm_pp_degree megatron_lm_num_micro_batches megatron_lm_sequence_parallelism "
        "megatron_lm_recompute_activations megatron_lm_gradient_clipping megatron_lm_use_distributed_optimizer"
    ),
    "parallelism_config": {
        **used(" ".join(f"{name} parallelism_config_{name}" for name in PARALLELISM)),
        **unneeded(
            "cp_comm_strategy parallelism_config_cp_comm_strategy parallelism_config_cp_backend parallelism_config_sp_backend "
            "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
            "parallelism_config_sp_attn_implementation",
            "context parallelism exchanges heads here",
        ),
    },
    "tp_config": used("tp_size"),
    **unneeded(
        "compute_environment machine_rank main_process_ip main_process_port main_training_function rdzv_backend same_network "
        "gpu_ids enable_cpu_affinity mpirun_config use_cpu debug downcast_bf16 command_file commands ipex_config "
        "use_mps_device",
        _STARTING,
    ),
    **unneeded("tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env", "there is no TPU in a plan"),
    **lacking("fp8_config", "a plan has no 8-bit precision: costed in 16 bits"),
}
