"""The plan flags as Megatron-LM, DeepSpeed, Accelerate, PyTorch and their launchers call them: what somebody may type by habit.

docs/glossary.md tells the same of words.
"""

from __future__ import annotations

_WRITTEN = {
    "dp": "data_parallel_size data_parallel data_parallel_degree dp_size",
    "tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel model_parallel_size tensor_parallel_degree tp_size "
    "autotp_size",
    "pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel pipeline_parallel_degree pp_size num_stages",
    "cp": "context_parallel_size context_parallel context_parallel_degree cp_size ulysses_degree sequence_parallel_size",
    "ep": "expert_model_parallel_size expert_parallel_size expert_parallel expert_parallel_degree ep_size moe_expert_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank "
    "virtual_stages num_model_chunks",
    "ends=fewer": "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    "zero": "zero_stage zero_optimization_stage ddp_sharding data_parallel_sharding_strategy",
    "zero=1": "use_distributed_optimizer distributed_optimizer",
    "zero=3": "fsdp use_fsdp use_torch_fsdp2 use_megatron_fsdp fully_shard full_shard fsdp_sharding_strategy sharding_strategy",
    "hybrid": "zero_hpz_partition_size mics_shard_size data_parallel_shard_degree",
    "context": "cp_comm_type context_parallel_method",
    "microbatch": "micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size micro_batch mbs",
    "global_batch": "global_batch_size train_batch_size batch_size total_batch_size gbs",
    "schedule": "pipeline_parallel_schedule pipeline_schedule pp_schedule",
    "recompute": "recompute_granularity recompute_method activation_checkpointing activation_checkpoint_mode",
    "recompute=full": "gradient_checkpointing checkpoint_activations recompute_full",
    "recompute=selective": "recompute_activations recompute_selective",
    "precision": "mixed_precision dtype torch_dtype params_dtype",
    "precision=bf16": "bf16 bfloat16",
    "precision=fp16": "fp16 float16 half",
    "precision=fp32": "fp32 float32",
    "offload=optimizer": "offload_optimizer optimizer_cpu_offload cpu_offload offload_optimizer_device zero_offload",
    "offload=parameters": "offload_param offload_params offload_param_device cpu_offload_params",
    "compile": "torch_compile use_compile",
    "hosts": "nodes num_nodes nnodes num_machines",
    "devices": "num_gpus gpus n_gpus ngpus world_size num_processes num_devices",
    "nproc": "nproc_per_node procs",
    "memory": "gpu_memory memory_limit memory_budget max_memory",
    "from_deepspeed": "deepspeed deepspeed_config ds_config",
    "from_accelerate": "accelerate accelerate_config config_file",
}
FLAG_NAMES: dict[str, str] = {name: ours for ours, names in _WRITTEN.items() for name in names.split()}
"""Their name → ours, with the value that it stands for where it has none of its own."""


def our_name(theirs: str) -> str | None:
    """`--tensor-model-parallel-size`, `tensor_model_parallel_size` → `tp`; None for a name that is not known."""
    return FLAG_NAMES.get(theirs.lstrip("-").partition("=")[0].replace("-", "_").lower())
