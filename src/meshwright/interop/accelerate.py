"""An Accelerate configuration as a plan.

distributed_type     NO: one rank; MULTI_GPU, MULTI_CPU: replicas; FSDP, DEEPSPEED, MEGATRON_LM: as their sections say
num_processes        ranks; num_machines: hosts
mixed_precision      precision
fsdp_config          FULL_SHARD, or reshard_after_forward: ZeRO 3; SHARD_GRAD_OP: ZeRO 2; NO_SHARD: replicas;
                     HYBRID_…: sharding groups of one host; activation checkpointing: full recompute; offload
deepspeed_config     a DeepSpeed file, or the same few keys (interop/deepspeed.py)
megatron_lm_config   tp, pp, microbatches, sequence parallel, selective recompute, distributed optimizer: ZeRO 1
parallelism_config   dp_replicate × dp_shard: dp, in sharding groups of dp_shard; tp; cp or sp: cp
dynamo_config        inductor: compiled blocks
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import yaml

from meshwright.core.bounds import MOST_NESTED
from meshwright.core.codec import load
from meshwright.core.errors import InputError
from meshwright.core.files.given_file import check_plain, read_given
from meshwright.core.graph import Precision
from meshwright.core.plan import Offload, ZeroStage
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.interop.deepspeed import read_deepspeed
from meshwright.interop.foreign import Foreign, Keys
from meshwright.interop.foreign_keys import known_keys

TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
ELSEWHERE = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "XLA", "TPU", "TP")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PARALLELISM = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
ZERO_OF: dict[str, ZeroStage] = {
    "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2,
}  # fmt: skip


def load_accelerate(path: str) -> Foreign:
    """Read the YAML (or JSON) file that `accelerate config` writes."""
    source = Path(path)
    if source.suffix == ".json":
        return read_accelerate(load(path, dict[str, Any]), path)
    if source.suffix not in (".yaml", ".yml"):
        raise InputError(f"{path}: an Accelerate configuration is a .yaml, .yml or .json file")
    return read_accelerate(_parse_yaml(read_given(source), path), path)


def _parse_yaml(text: str, where: str) -> object:
    try:
        raw = yaml.load(text, _Strict)
    except RecursionError:
        raise InputError(f"{where}: lists and objects are nested more than {MOST_NESTED} deep") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that Python does not have
        raise InputError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    check_plain(raw, where)
    return raw


class _Strict(yaml.SafeLoader):  # type: ignore[misc]
    """Plain YAML in which a key may not be given twice, and nothing stands for something else: a few aliases of aliases are more
    than a machine can hold."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read: write the value itself", mark)
        found: yaml.Node | None = super().compose_node(parent, index)
        return found

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key '{twice}' is given twice", node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def read_accelerate(raw: object, where: str) -> Foreign:
    keys = Keys(raw, known_keys("accelerate"), where)
    if keys.values.get("distributed_type") is False:  # YAML reads a bare NO so
        keys.values["distributed_type"] = "NO"
    kind = keys.word("distributed_type", (*TYPES, *ELSEWHERE))
    if kind is None:
        raise InputError(f"{where}: distributed_type is missing: give one of {', '.join(TYPES)}")
    if kind in ELSEWHERE:
        raise InputError(
            f"{where}: distributed_type {kind} is for hardware a plan does not know: use one of {', '.join(TYPES)}"
        )
    found = _SECTIONS[kind](keys)
    ranks = 1 if kind == "NO" else _num_ranks(keys)
    return msgspec.structs.replace(
        found,
        where=where,
        request=_with_rest(found.request, keys),
        num_ranks=ranks,
        num_hosts=keys.number("num_machines"),
        without_effect=(*keys.without_effect, *found.without_effect),
        not_planned=(*keys.not_planned, *found.not_planned, *_eight_bits(keys), *_other_compiler(keys)),
    )


def _num_ranks(keys: Keys) -> int | None:
    """-1 leaves it to the launcher."""
    return None if keys.values.get("num_processes") == -1 else keys.number("num_processes")


def _with_rest(request: PlanRequest, keys: Keys) -> PlanRequest:
    """The request with the keys of every distributed type: precision, compiled blocks, the mesh."""
    mesh = _parallelism(keys, request.zero or 0)
    changes = {**mesh, "compile": True if _compiler(keys) == "inductor" else None}
    if request.precision is None:
        changes["precision"] = _precision(keys)
    return msgspec.structs.replace(request, **changes)


def _precision(keys: Keys) -> Precision | None:
    """YAML reads a bare `no` as false. Left open for 8 bits, and where the key is missing."""
    value = keys.values.get("mixed_precision")
    if value is None:
        return None
    if value is False:
        return "fp32"
    word = keys.word("mixed_precision", ("no", "fp16", "bf16", "fp8"))
    return {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}.get(str(word))  # type: ignore[return-value]


def _compiler(keys: Keys) -> str:
    """YAML reads a bare `no` as false."""
    named = keys.values.get("dynamo_config.dynamo_backend", keys.values.get("dynamo_backend"))
    return "no" if named in (None, False) else str(named).casefold()


def _other_compiler(keys: Keys) -> tuple[str, ...]:
    if _compiler(keys) in ("no", "inductor"):
        return ()
    return (f"dynamo_backend: a plan compiles with inductor or not at all: costed without '{_compiler(keys)}'",)


def _eight_bits(keys: Keys) -> tuple[str, ...]:
    if keys.values.get("mixed_precision") != "fp8":
        return ()
    return ("mixed_precision: a plan has no 8-bit precision: costed in 16 bits",)


def _parallelism(keys: Keys, zero: int) -> dict[str, Any]:
    sizes = {
        name: keys.number(f"parallelism_config.parallelism_config_{name}") or keys.number(f"parallelism_config.{name}")
        for name in PARALLELISM
    }
    tensor = keys.number("tp_config.tp_size")
    found: dict[str, Any] = {}
    if sizes["tp_size"] or tensor:
        found["tp"] = sizes["tp_size"] or tensor
    if (sizes["cp_size"] or 1) > 1 and (sizes["sp_size"] or 1) > 1:
        raise InputError(
            f"{keys.where}: parallelism_config cuts the sequence by both cp_size and sp_size: keep one of them"
        )
    if sizes["cp_size"] or sizes["sp_size"]:
        found["cp"] = max(sizes["cp_size"] or 1, sizes["sp_size"] or 1)
    replicas, shards = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    if replicas or shards:
        found["dp"] = (replicas or 1) * (shards or 1)
        if (shards or 1) == 1:
            found |= {"zero": 0, "hybrid": None}
        elif zero == 0:
            raise InputError(
                f"{keys.where}: parallelism_config.dp_shard_size is {shards}, but nothing shards: use FSDP"
            )
        else:
            found["hybrid"] = shards if (replicas or 1) > 1 else None
    return found


def _replicas(keys: Keys) -> Foreign:
    return Foreign(where=keys.where, request=PlanRequest(zero=0))


def _fsdp(keys: Keys) -> Foreign:
    zero, hybrid = _sharding(keys)
    recompute = keys.switch("fsdp_config.fsdp_activation_checkpointing")
    offload = Offload(what="parameters") if keys.switch("fsdp_config.fsdp_offload_params") else Offload()
    request = PlanRequest(
        zero=zero, hybrid=_devices_of_a_host(keys) if hybrid else None, recompute="full" if recompute else None
    )
    return Foreign(where=keys.where, request=request, offload=offload)


def _sharding(keys: Keys) -> tuple[ZeroStage, bool]:
    """ZeRO stage, and whether state is sharded within a host (HSDP). Version 2 says only whether to reshard after forward."""
    numbered = {str(number): name for number, name in enumerate(STRATEGIES, start=1)}
    given = keys.values.get("fsdp_config.fsdp_reshard_after_forward")
    if isinstance(given, bool):
        if "fsdp_config.fsdp_sharding_strategy" not in keys.values:
            return (3 if given else 2), False
        strategy = _strategy(keys, "fsdp_sharding_strategy", numbered)
        if (ZERO_OF[strategy] == 3) != given:
            raise InputError(
                f"{keys.where}: fsdp_config says {strategy}, but fsdp_reshard_after_forward is {str(given).lower()}: keep one"
            )
        return ZERO_OF[strategy], strategy.startswith("HYBRID")
    name = "fsdp_sharding_strategy" if given is None else "fsdp_reshard_after_forward"
    strategy = _strategy(keys, name, numbered)
    return ZERO_OF[strategy], strategy.startswith("HYBRID")


def _strategy(keys: Keys, name: str, numbered: dict[str, str]) -> str:
    value = str(keys.values.get(f"fsdp_config.{name}", "FULL_SHARD"))
    if value in numbered:
        return numbered[value]
    return keys.word(f"fsdp_config.{name}", STRATEGIES) or "FULL_SHARD"


def _devices_of_a_host(keys: Keys) -> int | None:
    """Ranks of one host; None where one host has them all."""
    ranks, hosts = _num_ranks(keys), keys.number("num_machines") or 1
    if hosts == 1:
        return None
    if ranks is None or ranks % hosts:
        raise InputError(f"{keys.where}: num_processes does not divide over {hosts} machines: give as many on each")
    return ranks // hosts


def _deepspeed(keys: Keys) -> Foreign:
    file = keys.values.get("deepspeed_config.deepspeed_config_file")
    if file not in (None, "none"):
        beside = Path(keys.where).parent / str(file)
        return _deepspeed_file(str(beside if os.path.exists(beside) else file))
    section = "deepspeed_config."
    raw: dict[str, Any] = {"zero_optimization": {"stage": keys.values.get(f"{section}zero_stage", 2)}}
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        if f"{section}{name}" in keys.values:
            raw[name] = keys.values[f"{section}{name}"]
    for what in ("optimizer", "param"):
        if f"{section}offload_{what}_device" in keys.values:
            raw["zero_optimization"][f"offload_{what}"] = {"device": keys.values[f"{section}offload_{what}_device"]}
    found = read_deepspeed(raw, keys.where)
    return msgspec.structs.replace(found, request=msgspec.structs.replace(found.request, precision=None))


def _deepspeed_file(path: str) -> Foreign:
    """Accelerate gives its own precision to a DeepSpeed file that names none."""
    raw = load(path, dict[str, Any])
    found = read_deepspeed(raw, path)
    if raw.keys() & {"bf16", "fp16", "bfloat16"}:
        return found
    return msgspec.structs.replace(found, request=msgspec.structs.replace(found.request, precision=None))


def _megatron(keys: Keys) -> Foreign:
    section = "megatron_lm_config.megatron_lm_"
    clipping = keys.share(f"{section}gradient_clipping")
    tp = keys.number(f"{section}tp_degree") or 1
    request = PlanRequest(
        tp=tp,
        pp=keys.number(f"{section}pp_degree") or 1,
        sequence_parallel=bool(keys.switch(f"{section}sequence_parallelism")) if tp > 1 else None,
        recompute="selective" if keys.switch(f"{section}recompute_activations") else None,
        zero=1 if keys.switch(f"{section}use_distributed_optimizer") else 0,
    )
    return Foreign(
        where=keys.where,
        request=request,
        num_microbatches=keys.number(f"{section}num_micro_batches"),
        recipe=Recipe(clips=bool(clipping)),
    )


_SECTIONS = {
    "NO": _replicas,
    "MULTI_GPU": _replicas,
    "MULTI_CPU": _replicas,
    "FSDP": _fsdp,
    "DEEPSPEED": _deepspeed,
    "MEGATRON_LM": _megatron,
}
