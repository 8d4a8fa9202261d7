"""Hugging Face models from their config alone: blocks, parameters, and the flops torch counts in a real run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ASSETS
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capturing.blocks import find_blocks
from meshwright.capturing.capture import capture_source
from meshwright.capturing.opkinds import flops_of
from meshwright.core.errors import InputError
from meshwright.core.graph import Graph
from meshwright.models.objective import IGNORED_LABEL, call
from meshwright.models.source import ModelSource, resolve
from meshwright.planner.graphs import graph_of
from meshwright.runtime._torch import TorchDispatchMode

DEPTH = 5
DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67, "max_position_embeddings": 16,
}  # fmt: skip
ENCODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "vocab_size": 67,
    "max_position_embeddings": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **DECODER},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **DECODER},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **DECODER},
    "mistral": {"architectures": ["MistralForCausalLM"], **DECODER, "sliding_window": 8},
    "gemma": {"architectures": ["GemmaForCausalLM"], **DECODER},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **DECODER, "sliding_window": 8},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **DECODER, "sliding_window": 8},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": DEPTH, "n_head": 4, "n_positions": 16,
        "vocab_size": 67,
    },
    "bert": {"architectures": ["BertForMaskedLM"], **ENCODER},
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": DEPTH,
        "num_decoder_layers": DEPTH, "num_heads": 4, "vocab_size": 67, "n_positions": 16, "is_encoder_decoder": True,
    },
    "vit": {"architectures": ["ViTForImageClassification"], **ENCODER, "image_size": 32, "patch_size": 8},
}  # fmt: skip
BLOCKS = {
    "gpt2": ["transformer.h"], "bert": ["bert.encoder.layer"], "t5": ["encoder.block", "decoder.block"],
    "vit": ["vit.layers"],
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSource]:
    folder = tmp_path_factory.mktemp("configs")
    return {kind: source_of(folder, kind, config) for kind, config in CONFIGS.items()}


def source_of(folder: Path, kind: str, config: dict[str, Any]) -> ModelSource:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind, **config}))
    return resolve(f"hf:{path}")


@pytest.fixture(scope="module")
def graphs(sources: dict[str, ModelSource]) -> dict[str, Graph]:
    return {kind: capture_source(source) for kind, source in sources.items()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_and_blocks(kind: str, sources: dict[str, ModelSource], graphs: dict[str, Graph]) -> None:
    graph = graphs[kind]
    assert graph.num_parameters == sum(p.numel() for p in sources[kind].build().parameters())
    stems = BLOCKS.get(kind, ["model.layers"])
    assert list(graph.repeated_blocks) == [f"{stem}.{number}" for stem in stems for number in range(DEPTH)]
    assert graph.guesses == ()


class Counter(TorchDispatchMode):
    """Flops of a real run: torch's own formulas, and ours for the ops it has none for."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.flops += flops_of(op, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize("kind", CONFIGS)
def test_flops_are_those_of_a_real_run(kind: str, sources: dict[str, ModelSource], graphs: dict[str, Graph]) -> None:
    source = sources[kind]
    assert source.example is not None
    module, batch = source.build(), source.example(3)
    with Counter() as counter:
        source.objective.loss(call(module, batch), batch).backward()
    assert graphs[kind].flops(3) == counter.flops


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_flops_are_those_torch_counts(kind: str, tmp_path: Path) -> None:
    """With attention as plain products, for which torch has formulas of its own."""
    source = source_of(
        tmp_path, kind, CONFIGS[kind] | {"_attn_implementation": "eager", "attn_implementation": "eager"}
    )
    assert source.example is not None
    module, batch = source.build(), source.example(3)
    with FlopCounterMode(display=False) as counter:
        source.objective.loss(call(module, batch), batch).backward()
    assert capture_source(source).flops(3) == counter.get_total_flops()


@pytest.mark.parametrize("kind", CONFIGS)
def test_attention_is_found(kind: str, graphs: dict[str, Graph]) -> None:
    graph = graphs[kind]
    for block in graph.repeated_blocks:
        ops = graph.kind_by_block[block].ops
        inside = [op for op in ops if op.region == "attention"]
        assert {op.phase for op in inside} == {"forward", "backward"}
        assert any(op.kind == "attention" or op.name.endswith("softmax") for op in inside)


def test_experts_of_mixtral(graphs: dict[str, Graph]) -> None:
    """Two of four experts' work for each token, however the experts are run."""
    graph = graphs["mixtral"]
    assert {p.name.rpartition(".")[2] for p in graph.parameters if p.expert} == {"gate_up_proj", "down_proj"}
    ops = graph.kind_by_block["model.layers.1"].ops
    work = sum(op.flops.at(1) for op in ops if op.region == "expert" and op.phase == "forward")
    assert work == 16 * 2 * 2 * 3 * 32 * 48


@pytest.mark.parametrize(
    ("kind", "config", "parameters"),
    [
        ("llama", {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
                   "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}, 6_738_415_616),
        ("mixtral", {"architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
                     "num_local_experts": 8, "num_experts_per_tok": 2}, 46_702_792_704),
    ],
)  # fmt: skip
def test_full_size(kind: str, config: dict[str, Any], parameters: int, tmp_path: Path) -> None:
    started = time.perf_counter()
    graph = capture_source(source_of(tmp_path, kind, config))
    assert graph.num_parameters == parameters
    assert time.perf_counter() - started < 30, "it takes three seconds on an idle machine"


TINY = {
    "bert": {"input_ids": (3, 16), "labels": (3, 16)},
    "t5": {"input_ids": (3, 16), "labels": (3, 16), "decoder_input_ids": (3, 16)},
    "vit": {"pixel_values": (3, 3, 16, 16), "labels": (3,)},
    "mixtral": {"input_ids": (3, 16), "labels": (3, 16)},
    "llama": {"input_ids": (3, 16), "labels": (3, 16)},
    "gpt2": {"input_ids": (3, 16), "labels": (3, 16)},
}


@pytest.mark.parametrize("kind", TINY)
def test_tiny_configs_have_their_examples(kind: str) -> None:
    for source in (resolve(f"hf:{ASSETS}/{kind}-tiny.json"), resolve(f"hf:{ASSETS}/{kind}-tiny.json").small()):
        batch = example_of(source)
        assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == TINY[kind]
        loss = source.objective.loss(call(source.build(), batch), batch)
        assert torch.isfinite(loss)
    labels = batch["labels"]
    assert (labels == IGNORED_LABEL).float().mean() == (14 / 16 if kind == "bert" else 0)


def test_a_text_classifier_has_a_class_for_each_sample(tmp_path: Path) -> None:
    config = CONFIGS["bert"] | {"architectures": ["BertForSequenceClassification"], "num_labels": 5}
    source = source_of(tmp_path, "bert", config)
    batch = example_of(source)
    assert batch["labels"].shape == (3,)
    assert call(source.build(), batch).logits.shape == (3, 5)
    assert capture_source(source).tokens_per_sample == 1


def test_shrunk_configs_are_small_in_every_way(tmp_path: Path) -> None:
    image = CONFIGS["vit"] | {"image_size": 224, "patch_size": 16, "hidden_dropout_prob": 0.3}
    small = source_of(tmp_path, "vit", image).small()
    assert example_of(small)["pixel_values"].shape == (3, 3, 64, 64)
    text = CONFIGS["t5"] | {"n_positions": 512}
    assert example_of(source_of(tmp_path, "t5", text).small())["decoder_input_ids"].shape == (3, 16)
    for kind, config in (("t5", text), ("vit", image), ("mixtral", CONFIGS["mixtral"] | {"router_jitter_noise": 0.1})):
        module: Any = source_of(tmp_path, kind, config).small().build()
        settings = module.config.to_dict()
        assert not [key for key, value in settings.items() if ("drop" in key or "jitter" in key) and value]
        assert sum(find_blocks(module).values()) == (8 if kind == "t5" else 4)


def example_of(source: ModelSource) -> dict[str, Tensor]:
    assert source.example is not None
    batch = source.example(3)
    assert isinstance(batch, dict)
    return batch


def test_the_name_says_how_long_samples_are(tmp_path: Path) -> None:
    fields = {**json.loads((ASSETS / "llama-tiny.json").read_text(encoding="utf-8")), "max_position_embeddings": 4096}
    path = tmp_path / "long.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    tokens = [graph_of(f"hf:{path}{option}", "fp32").tokens_per_sample for option in ("", ",seq=64", ",seq=4096")]
    assert tokens == [2048, 64, 4096]
    for option, words in ((",seq=4097", "4096 positions"), (",seq=0", "whole number"), (",seq=x", "whole number")):
        with pytest.raises(InputError, match=words):
            resolve(f"hf:{path}{option}")
