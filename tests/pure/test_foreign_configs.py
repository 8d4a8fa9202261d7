"""Configurations of DeepSpeed and Accelerate as plans: strict, and true to what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from machines import chain_graph

from meshwright.core.errors import InputError
from meshwright.core.plan import Mesh, Offload, Plan
from meshwright.core.request import PlanRequest
from meshwright.interop.accelerate import load_accelerate, read_accelerate
from meshwright.interop.deepspeed import load_deepspeed, read_deepspeed
from meshwright.interop.foreign import Foreign, batch_of, filled, foreign_plan

CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
GRAPH = chain_graph(8)


def plan_of(foreign: Foreign, num_devices: int = 8, **flags: Any) -> Plan:
    return foreign_plan(foreign, PlanRequest(precision=None, **flags), GRAPH, num_devices, "")


def deepspeed(**keys: Any) -> Foreign:
    return read_deepspeed(keys, "ds.json")


def accelerate(**keys: Any) -> Foreign:
    return read_accelerate(keys, "config.yaml")


# Files as people have them


def test_a_deepspeed_file_with_every_size() -> None:
    found = load_deepspeed(str(CONFIGS / "deepspeed-zero2.json"))
    assert found.request.precision == "bf16"
    assert found.recipe.clips
    assert found.not_planned == ()
    assert any(words.startswith("zero_optimization.overlap_comm: ") for words in found.without_effect)
    assert any("give --recompute full" in words for words in found.without_effect)
    global_batch, microbatch = batch_of(found, found.request, 8)
    assert (global_batch, microbatch, found.num_microbatches, found.request.zero) == (64, 2, 4, 2)


def test_a_deepspeed_file_that_leaves_everything_to_the_script() -> None:
    found = load_deepspeed(str(CONFIGS / "deepspeed-zero3-offload.json"))
    assert found.offload == Offload(what="parameters")
    assert (found.request.zero, found.request.precision, found.num_microbatches) == (3, None, None)
    with pytest.raises(InputError, match="leaves the batch size to the script: give it with --global-batch"):
        plan_of(found)
    plan = plan_of(found, global_batch=64, microbatch=2)
    assert (plan.num_microbatches, plan.zero, plan.offload.what) == (4, 3, "parameters")


def test_hybrid_sharding_over_two_machines() -> None:
    found = load_accelerate(str(CONFIGS / "accelerate-fsdp.yaml"))
    assert (found.num_ranks, found.num_hosts) == (16, 2)
    assert found.request == PlanRequest(zero=3, hybrid=8, recompute="full", precision="bf16")


def test_version_two_with_a_mesh() -> None:
    """A bare `no` is false in YAML; reshard_after_forward: false is ZeRO 2; replicas of groups of four."""
    found = load_accelerate(str(CONFIGS / "accelerate-fsdp2.yaml"))
    assert found.request == PlanRequest(dp=8, tp=1, cp=1, zero=2, hybrid=4, precision="fp32", compile=True)
    assert plan_of(found, global_batch=16).mesh == Mesh(dp=8)


def test_accelerate_that_names_a_deepspeed_file() -> None:
    found = load_accelerate(str(CONFIGS / "accelerate-deepspeed.yaml"))
    assert (found.num_ranks, found.offload.what, found.request.zero) == (8, "parameters", 3)
    assert found.request.precision == "bf16"


def test_megatron() -> None:
    found = load_accelerate(str(CONFIGS / "accelerate-megatron.yaml"))
    assert found.request == PlanRequest(
        tp=2, pp=2, zero=1, sequence_parallel=True, recompute="selective", precision="bf16"
    )
    assert (found.num_microbatches, found.recipe.clips) == (4, True)


# Batch sizes


@pytest.mark.parametrize(
    ("keys", "flags", "expected"),
    [
        ({"train_batch_size": 64}, {}, (64, 8, 1)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, {}, (64, 2, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, {}, (64, 4, 2)),
        ({"train_micro_batch_size_per_gpu": 4}, {}, (32, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, {}, (96, 4, 3)),
        (
            {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2},
            {"global_batch": 32},
            (32, 2, 2),
        ),
        ({"train_batch_size": "auto"}, {"microbatch": 2}, (16, 2, 1)),
        ({"train_batch_size": 64, "tensor_parallel": {"autotp_size": 2}}, {}, (64, 16, 1)),
    ],
)
def test_any_two_sizes_give_the_third(
    keys: dict[str, Any], flags: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    found = deepspeed(**keys)
    request = filled(found, PlanRequest(**flags))
    dp = 8 // ((request.tp or 1) * (request.pp or 1))
    batch, size = batch_of(found, request, dp)
    assert (batch, size, batch // (size * dp)) == expected


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8},
            "microbatches of 2 × 8 accumulation steps × dp 8 do not make a batch of 64: make the batch a multiple of 128",
        ),
        ({"train_batch_size": 63}, "a batch of 63 does not divide over dp 8: make it a multiple of 8, or"),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3},
            "microbatches of 3 × dp 8 do not make a batch of 64",
        ),
        (
            {"train_batch_size": 64, "gradient_accumulation_steps": 3},
            "a batch of 64 does not divide over 3 accumulation steps × dp 8: make it a multiple of 24",
        ),
    ],
)
def test_sizes_that_do_not_multiply_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"ds.json: {said}"):
        plan_of(deepspeed(**keys))


def test_a_flag_against_the_file_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"ds\.json says global batch 64, but --global-batch is 32: leave the flag out"
    ):
        plan_of(deepspeed(train_batch_size=64), global_batch=32)
    assert plan_of(deepspeed(train_batch_size=64), global_batch=64).global_batch == 64


def test_degrees_that_do_not_make_the_ranks() -> None:
    with pytest.raises(InputError, match="degrees tp 3 do not make 8 ranks"):
        plan_of(deepspeed(train_batch_size=8, tensor_parallel={"autotp_size": 3}))
    mesh = {"parallelism_config_dp_shard_size": 4}
    four = accelerate(distributed_type="FSDP", num_processes=8, parallelism_config=mesh)
    with pytest.raises(InputError, match="degrees dp 4 do not make 8 ranks"):
        plan_of(four, global_batch=8)


# DeepSpeed's keys


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"train_batchsize": 8}, "train_batchsize: unknown key 'train_batchsize': did you mean 'train_batch_size'?"),
        ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag: unknown key 'stag': did you mean 'stage'?"),
        ({"zero_optimization": {"offload_param": {"devise": 1}}}, "zero_optimization.offload_param.devise: .*'device'"),
        ({"zero_optimization": True}, "zero_optimization holds True, not keys with values"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: give 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage is '2': give a whole number"),
        ({"train_batch_size": True}, "train_batch_size is True: give a whole number of 1 to"),
        ({"train_batch_size": 0}, "train_batch_size is 0: give a whole number of 1 to"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes': give true, false or 'auto'"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "are both true: keep one"),
        ({"amp": {"enabled": True}}, "amp.enabled: Apex"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param needs stage 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer needs stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, "device is 'gpu': "),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 4}}, "mics_shard_size needs stage 3"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1: give a number of 0 to"),
    ],
)
def test_what_deepspeed_would_not_take_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"ds.json: .*{said}|ds.json: {said}"):
        deepspeed(**keys)


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        ({"stage": 1, "cpu_offload": True}, Offload(what="optimizer")),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, Offload(what="optimizer", share=0.3)),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            Offload(what="optimizer", where="disk", folder="/x"),
        ),
        ({"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}, Offload()),
    ],
)
def test_offload(zero: dict[str, Any], offload: Offload) -> None:
    assert deepspeed(zero_optimization=zero).offload == offload


def test_what_a_plan_does_not_do_is_said_only_where_it_is_on() -> None:
    quiet = deepspeed(
        zero_optimization={"stage": 3, "zero_quantized_weights": False, "zero_hpz_partition_size": 1},
        sparse_gradients=False,
        elasticity={"enabled": False},
        progressive_layer_drop={},
    )
    assert quiet.not_planned == ()
    loud = deepspeed(
        zero_optimization={"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8},
        elasticity={"enabled": True},
        optimizer={"type": "Sophia"},
    )
    assert [words.partition(":")[0] for words in loud.not_planned] == [
        "zero_optimization.zero_quantized_weights", "elasticity", "zero_optimization.zero_hpz_partition_size", "optimizer.type",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        ({"type": "AdamW"}, 2),
        ({"type": "FusedAdam"}, 2),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 1),
        ({"type": "SGD", "params": {"lr": 0.1}}, 0),
    ],
)
def test_what_the_optimizer_keeps(optimizer: dict[str, Any], slots: int) -> None:
    found = deepspeed(optimizer=optimizer)
    assert found.recipe.optimizer_slots == slots
    assert found.not_planned == ()


@pytest.mark.parametrize(
    ("name", "slots"),
    [("OneBitAdam", 2), ("ZeroOneAdam", 2), ("OneBitLamb", 2), ("Lamb", 2), ("Lion", 1), ("Muon", 1), ("Sophia", 2)],
)
def test_what_the_optimizer_does_and_a_plan_does_not_is_said(name: str, slots: int) -> None:
    found = deepspeed(optimizer={"type": name})
    assert found.recipe.optimizer_slots == slots
    (said,) = found.not_planned
    assert said.startswith("optimizer.type: ")
    assert name in said


def test_other_precisions_and_compilers_are_said() -> None:
    assert deepspeed(torch_autocast={"enabled": True, "dtype": "bfloat16"}).not_planned
    assert not deepspeed(torch_autocast={"enabled": False}).not_planned
    assert accelerate(distributed_type="NO", dynamo_backend="CUDAGRAPHS").not_planned
    assert not accelerate(distributed_type="NO", dynamo_config={"dynamo_backend": "INDUCTOR"}).not_planned
    assert not accelerate(distributed_type="NO", dynamo_backend=False).not_planned


def test_degrees_and_groups() -> None:
    found = deepspeed(
        sequence_parallel_size=2,
        tensor_parallel={"autotp_size": 2},
        pipeline={"stages": 2, "activation_checkpoint_interval": 1},
        zero_optimization={"stage": 3, "mics_shard_size": 2},
        bf16={"enabled": True},
    )
    assert found.request == PlanRequest(tp=2, pp=2, cp=2, zero=3, hybrid=2, precision="bf16", recompute="full")
    assert deepspeed(tensor_parallel={"autotp_size": 0}, pipeline={"stages": "auto"}).request == PlanRequest(
        zero=0, precision="fp32"
    )
    assert deepspeed().request.precision == "fp32"


# Accelerate's keys


@pytest.mark.parametrize(
    ("fsdp", "expected"),
    [
        ({}, (3, None)),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, (2, None)),
        ({"fsdp_sharding_strategy": 1}, (3, None)),
        ({"fsdp_sharding_strategy": 3}, (0, None)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, (2, 4)),
        ({"fsdp_reshard_after_forward": True, "fsdp_version": 2}, (3, None)),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_version": 1}, (2, None)),
        ({"fsdp_reshard_after_forward": True, "fsdp_sharding_strategy": "HYBRID_SHARD"}, (3, 4)),
    ],
)
def test_sharding_strategies(fsdp: dict[str, Any], expected: tuple[int, int | None]) -> None:
    found = accelerate(distributed_type="FSDP", num_processes=8, num_machines=2, fsdp_config=fsdp)
    assert (found.request.zero, found.request.hybrid) == expected


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "distributed_type is missing"),
        ({"distributed_type": "FDSP"}, "distributed_type is 'FDSP': did you mean 'FSDP'?"),
        ({"distributed_type": "XLA"}, "distributed_type XLA is for hardware a plan does not know"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_param": True}}, "did you mean 'fsdp_offload_params'?"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": False, "fsdp_sharding_strategy": 1}},
            "says FULL_SHARD, but fsdp_reshard_after_forward is false: keep one",
        ),
        ({"distributed_type": "NO", "mixed_precision": "bf61"}, "mixed_precision is 'bf61': did you mean 'bf16'?"),
        (
            {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_dp_shard_size": 4}},
            "dp_shard_size is 4, but nothing shards: use FSDP",
        ),
        (
            {"distributed_type": "FSDP", "parallelism_config": {"cp_size": 2, "sp_size": 2}},
            "cuts the sequence by both cp_size and sp_size",
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 7, "num_machines": 2, "fsdp_config": {"fsdp_sharding_strategy": 4}},
            "num_processes does not divide over 2 machines",
        ),
    ],
)  # fmt: skip
def test_what_accelerate_would_not_take_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        accelerate(**keys)
    assert str(raised.value).startswith("config.yaml: ")
    assert said in str(raised.value)


def test_the_plain_kinds() -> None:
    for one in ("NO", False):  # a bare NO is false in YAML
        assert accelerate(distributed_type=one, mixed_precision="no").num_ranks == 1
    replicas = accelerate(distributed_type="MULTI_GPU", num_processes=4, mixed_precision="fp16")
    assert (replicas.num_ranks, replicas.request) == (4, PlanRequest(zero=0, precision="fp16"))
    assert accelerate(distributed_type="MULTI_GPU", num_processes=-1).num_ranks is None
    own = accelerate(
        distributed_type="DEEPSPEED",
        mixed_precision="bf16",
        deepspeed_config={"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 2},
    )
    assert (own.request.zero, own.request.precision, own.offload.what, own.num_microbatches) == (
        2,
        "bf16",
        "optimizer",
        2,
    )
    eight = accelerate(distributed_type="NO", mixed_precision="fp8")
    assert eight.request.precision is None
    assert eight.not_planned == ("mixed_precision: a plan has no 8-bit precision: costed in 16 bits",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: FSDP\ndistributed_type: NO\n", "the key 'distributed_type' is given twice"),
        ("distributed_type: [FSDP\n", "not valid YAML"),
        ("- FSDP\n", "the file holds .*, not keys with values"),
    ],
)
def test_files_that_cannot_be_read(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=said):
        load_accelerate(str(file))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a \.json file"):
        load_deepspeed("config.yaml")
    with pytest.raises(InputError, match="no such file"):
        load_accelerate(str(tmp_path / "none.yaml"))
    (tmp_path / "config.txt").write_text("")
    with pytest.raises(InputError, match=r"is a \.yaml, \.yml or \.json file"):
        load_accelerate(str(tmp_path / "config.txt"))
