"""Weights that transformers saved, read into models that are spread: the same numbers, and no rank reads more than it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from captures import shared_graph
from pool import RankPool, this_rank
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.plan import Offload, Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.clip import local
from meshwright.runtime.deferred import building, deferred
from meshwright.runtime.gather import put_together
from meshwright.runtime.mesh import axis_groups
from meshwright.runtime.offload.saved import masters_of
from meshwright.runtime.places import places_of
from meshwright.runtime.program import Program
from meshwright.runtime.undrawn import undrawn
from meshwright.training.pretrained import Imported, fill, match
from meshwright.training.weights_folder import INDEX, ONE_FILE, WeightsFolder

Pools = Callable[[int], RankPool]
GLOBAL_BATCH = 4
DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 66, "max_position_embeddings": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **DECODER},
    "tied": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **DECODER, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16,
        "vocab_size": 66, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **DECODER, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 66, "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "vit": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "num_labels": 4,
    },
}  # fmt: skip


def saved(folder: Path, kind: str, dtype: torch.dtype = torch.float32, shard: str = "40KB") -> Path:
    """What transformers leaves of a model of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "made_of.json"
    config.write_text(json.dumps(CONFIGS[kind]))
    torch.manual_seed(5)
    module = resolve(f"hf:{config}").build()
    for parameter in module.parameters():
        nn.init.normal_(parameter.data, std=0.1)  # norms and biases too: ones and zeros would hide an exchange
    module.to(dtype).save_pretrained(folder, max_shard_size=shard)  # type: ignore[operator]
    return folder


@cache
def plan_for(config: str, num_ranks: int, precision: str, asked: str, offload: str = "{}") -> Plan:
    request = PlanRequest(
        microbatch=1, global_batch=GLOBAL_BATCH, precision=precision, **json.loads(asked),  # type: ignore[arg-type]
    )  # fmt: skip
    plan = plain_plan(request, shared_graph(resolve(config), precision), num_ranks, "tests")  # type: ignore[arg-type]
    plan = msgspec.structs.replace(plan, offload=Offload(**json.loads(offload)))
    return try_sharding(plan, resolve(config)) if request.tp or request.ep else plan


@dataclass(frozen=True)
class Seen:
    """By one rank."""

    loss: float
    wholes: dict[str, torch.Tensor]
    imported: Imported
    held_bytes: int


def imported(config: str, folder: Path, plan: Plan) -> Seen:
    source = resolve(config)
    with building(plan), undrawn():
        module = source.build()
    matched = match(WeightsFolder(folder), module)
    program = apply(
        module, plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), objective=source.objective,
        device=this_rank().device,
    )  # fmt: skip
    found = fill(program, matched)
    assert source.example is not None
    torch.manual_seed(3)
    loss = program.evaluate([source.example(GLOBAL_BATCH)])
    wholes = whole_parameters(program)
    held = sum(local(one).numel() for one in program.module.parameters())
    return Seen(loss, wholes, found, held)


def whole_parameters(program: Program) -> dict[str, torch.Tensor]:
    groups, places = axis_groups(program.module, program.mesh), places_of(program.module)
    masters = {} if program.host is None else masters_of(program.host)
    return {
        name: put_together(masters.get(id(parameter), parameter.detach()), places.get(name, ()), groups).clone()
        for name, parameter in program.module.named_parameters()
    }


def check(folder: Path, seen: list[Seen], kind: str, tolerance: float) -> None:
    """Every whole tensor is the one that transformers reads, and so is the loss."""
    import transformers

    named = CONFIGS[kind]["architectures"][0]
    reference = getattr(transformers, named).from_pretrained(folder, dtype=torch.float32)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    names: set[str] = set()
    for one in seen:
        names |= one.wholes.keys()
        for name, tensor in one.wholes.items():
            assert torch.equal(tensor.float(), expected[name].detach()), name
    assert names >= dict(reference.named_parameters()).keys()
    source = resolve(f"hf:{folder}/config.json")
    assert source.example is not None
    torch.manual_seed(3)
    batch = source.example(GLOBAL_BATCH)
    reference.eval()
    with torch.no_grad():
        loss = float(source.objective.loss(reference(**batch), batch))
    assert [one.loss for one in seen] == pytest.approx([loss] * len(seen), rel=tolerance)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "asked"),
    [
        ("llama", 1, {}),
        ("llama", 2, {"zero": 3}),
        ("gpt2", 2, {"tp": 2}),
        ("gpt2", 4, {"tp": 2, "zero": 3}),
        ("tied", 2, {"pp": 2}),
        ("tied", 2, {"zero": 3}),
        ("gpt2", 2, {"pp": 2}),
        ("mixtral", 2, {"ep": 2}),
        ("mixtral", 2, {"zero": 1}),
        ("bert", 2, {"tp": 2}),
        ("vit", 2, {"zero": 3}),
    ],
)
def test_every_plan_reads_what_transformers_saved(
    pool: Pools, tmp_path: Path, kind: str, num_ranks: int, asked: dict[str, Any]
) -> None:
    folder = saved(tmp_path / "weights", kind)
    assert (folder / INDEX).exists()
    config = f"hf:{folder}/config.json"
    plan = plan_for(config, num_ranks, "fp32", json.dumps(asked))
    seen = pool(num_ranks).run(imported, config, folder, plan)
    check(folder, seen, kind, 1e-5)
    for one in seen:
        assert one.imported.num_bytes == 4 * one.held_bytes, "no rank reads more than it holds"
        assert not one.imported.conversions
    if num_ranks > 1:
        stored = sum(tensor.numel() for tensor in seen[0].wholes.values())
        assert max(one.held_bytes for one in seen) < 0.8 * stored or asked.get("pp") or asked.get("ep")


@pytest.mark.parametrize(
    ("num_ranks", "asked", "offload"),
    [
        (1, {}, {"what": "optimizer"}),
        (1, {}, {"what": "optimizer", "share": 0.5}),
        (2, {"zero": 2}, {"what": "optimizer"}),
        (1, {"recompute": "full"}, {"what": "parameters"}),
        (1, {"recompute": "full"}, {"what": "parameters", "where": "disk"}),
        (2, {"recompute": "full", "zero": 3}, {"what": "parameters", "stash": "host"}),
    ],
)
def test_masters_on_the_host(
    pool: Pools, tmp_path: Path, num_ranks: int, asked: dict[str, Any], offload: dict[str, Any]
) -> None:
    """Masters hold what was stored, unrounded; what the device computes with is rounded from them."""
    folder = saved(tmp_path / "weights", "tied")
    config = f"hf:{folder}/config.json"
    if offload.get("where") == "disk":
        offload = {**offload, "folder": str(tmp_path)}
    plan = plan_for(config, num_ranks, "bf16", json.dumps(asked), json.dumps(offload))
    seen = pool(num_ranks).run(imported, config, folder, plan)
    check(folder, seen, "tied", 2e-2)
    assert all(not one.imported.conversions for one in seen)
    assert all(one.imported.num_bytes <= 4 * one.held_bytes for one in seen)


def test_other_dtypes_are_said(pool: Pools, tmp_path: Path) -> None:
    folder = saved(tmp_path / "weights", "llama", torch.bfloat16, shard="1GB")
    assert (folder / ONE_FILE).exists()
    config = f"hf:{folder}/config.json"
    (seen,) = pool(1).run(imported, config, folder, plan_for(config, 1, "fp32", "{}"))
    check(folder, [seen], "llama", 1e-5)
    assert list(seen.imported.conversions) == [("bfloat16", "float32")]
    with deferred(), undrawn():
        matched = match(WeightsFolder(folder), resolve(config).build())
    assert "stored as bfloat16 and held as float32, exactly" in seen.imported.describe(matched)
    rounded = Imported(1, seen.imported.conversions.__class__({("float64", "float32"): 2}))
    assert "2 stored as float64 and held as float32, rounded" in rounded.describe(matched)


def test_saved_without_its_head(tmp_path: Path) -> None:
    """As GPT-2 is on the hub: names without the prefix of the body, and a head that is tied to its embeddings."""
    folder = saved(tmp_path / "weights", "gpt2", shard="1GB")
    whole = load_file(folder / ONE_FILE)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    bare |= {f"h.{number}.attn.bias": torch.ones(1, 1, 16, 16) for number in range(4)}
    save_file(bare, folder / ONE_FILE)
    with deferred(), undrawn():
        matched = match(WeightsFolder(folder), resolve(f"hf:{folder}/config.json").build())
    assert matched.sources["lm_head.weight"] == matched.sources["transformer.wte.weight"]


# What is refused


def refused(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    tensors = load_file(folder / ONE_FILE)
    change(tensors)
    save_file(tensors, folder / ONE_FILE)
    with deferred(), undrawn():
        module = resolve(f"hf:{folder}/config.json").build()
    with pytest.raises(InputError) as caught:
        match(WeightsFolder(folder), module)
    return str(caught.value)


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    norm = "model.layers.2.input_layernorm.weight"

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[norm]

    def misspell(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.input_layernorm.weights"] = tensors.pop(norm)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.4.input_layernorm.weight"] = tensors[norm].clone()

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[norm] = tensors[norm][:-1].clone()

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors[norm] = tensors[norm].to(torch.int8)

    expected = {
        lose: f"'{norm}' of this model is not there",
        misspell: "did you mean 'model.layers.2.input_layernorm.weights'?",
        add: "'model.layers.4.input_layernorm.weight' is there, but not in this model",
        shorten: f"'{norm}' is [32] in this model and [31] there",
        quantise: f"'{norm}' is stored as I8",
    }
    for number, (change, words) in enumerate(expected.items()):
        folder = saved(tmp_path / str(number), "llama", shard="1GB")
        assert words in refused(folder, change)


def test_ties_that_differ_are_refused(pool: Pools, tmp_path: Path) -> None:
    folder = saved(tmp_path / "weights", "tied", shard="1GB")
    tensors = load_file(folder / ONE_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / ONE_FILE)
    config = f"hf:{folder}/config.json"
    plan = plan_for(config, 1, "fp32", "{}")
    (seen,) = pool(1).run(imported, config, folder, plan)
    assert seen.imported.num_bytes > 4 * seen.held_bytes
    tensors["lm_head.weight"][7, 3] += 1
    save_file(tensors, folder / ONE_FILE)
    from pool import RankError

    with pytest.raises(RankError, match=r"'lm_head.weight' and 'model.embed_tokens.weight' differ"):
        pool(1).run(imported, config, folder, plan)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        WeightsFolder(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="a pickle can run code"):
        WeightsFolder(tmp_path)
    folder = saved(tmp_path / "weights", "llama")
    index = json.loads((folder / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], name: f"../{file}"}}))
    with pytest.raises(InputError, match="no name of a file beside it"):
        WeightsFolder(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], "other": file}}))
    with pytest.raises(InputError, match="lacks tensor 'other'"):
        WeightsFolder(folder)
    (folder / INDEX).write_text(json.dumps(index))
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=f"{file}: not a whole safetensors file"):
        WeightsFolder(folder)
    (folder / file).unlink()
    with pytest.raises(InputError, match=f"{file}: no such file"):
        WeightsFolder(folder)


def test_nothing_is_drawn(tmp_path: Path) -> None:
    """And buffers are as they always are."""
    folder = saved(tmp_path / "weights", "llama")
    source = resolve(f"hf:{folder}/config.json")
    for context in (nullcontext(), deferred()):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        with context, undrawn():
            module = source.build()
        assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    source.build()
    assert not torch.equal(torch.get_rng_state(), before)
    assert dict(module.named_buffers()).keys() == dict(source.build().named_buffers()).keys()
