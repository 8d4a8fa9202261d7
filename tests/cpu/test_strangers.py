"""Models as people write them are followed, planned and at parity with one process; none is left other than it was."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ASSETS, ROOT
from pool import RankPool, this_rank

from meshwright.capturing.capture import capture_source
from meshwright.core.errors import InputError, ModelError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.examples import TextShape
from meshwright.models.objective import call
from meshwright.models.source import resolve
from meshwright.planner.parity import plain_plan_of_small
from meshwright.runtime._torch import FakeTensor

AXES: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2}, "cp": {"cp": 2}, "zero": {"zero": 3}}
FOLLOWED = [
    "function", "own_device", "reads", "lists", "cached_attribute", "cached_dict", "cached_buffer", "cached_global",
    "cached_function", "cached_method",
]  # fmt: skip


def named(stranger: str) -> str:
    return f"{ASSETS}/strangers.py:{stranger}"


def compare_on_rank(model: str, plan: Plan) -> ParityResult:
    return compare(resolve(model).small(), plan, 2, this_rank())


def run_alike(pool: Callable[[int], RankPool], model: str, axes: dict[str, Any]) -> Plan:
    plan = plain_plan_of_small(model, PlanRequest(**axes), 2)
    for result in pool(2).run(compare_on_rank, model, plan):
        assert result.ok, result.first_difference
    return plan


@pytest.mark.parametrize("stranger", FOLLOWED)
def test_a_model_is_followed_and_left_as_it_was(stranger: str) -> None:
    source = resolve(named(stranger))
    assert source.example is not None
    graph = capture_source(source, "fp64")
    assert graph.identity == capture_source(source, "fp64").identity
    assert graph.flow is not None
    assert len(graph.repeated_blocks) == 4
    module = source.build()
    assert not isinstance(call(module, source.example(2)), FakeTensor)


@pytest.mark.parametrize("stranger", ["function", "own_device", "cached_dict", "cached_global"])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_parity(pool: Callable[[int], RankPool], stranger: str, axes: dict[str, Any]) -> None:
    plan = run_alike(pool, named(stranger), axes)
    if plan.mesh.tp > 1:
        assert any("tp" in tensor.dims for rule in plan.sharding for tensor in rule.tensors)


@pytest.mark.parametrize(
    ("stranger", "repeated"),
    [
        ("numbered", ["layer1", "layer2", "layer3", "layer4"]),
        ("backwards", ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]),
        ("in_parts", ["blocks.0.up", "blocks.1.up", "blocks.2.up", "blocks.3.up"]),
        ("in_dicts", ["layers.layer_0", "layers.layer_1", "layers.layer_2", "layers.layer_3"]),
        ("of_lists", ["layers.0.1", "layers.1.1", "layers.2.1", "layers.3.1"]),
        ("plain_sequential", ["0", "2"]),
    ],
)
def test_blocks_are_what_is_called_in_the_order_of_calls(stranger: str, repeated: list[str]) -> None:
    graph = capture_source(resolve(named(stranger)))
    assert list(graph.repeated_blocks) == repeated
    assert graph.blocks[-1].name in ("head", "2")


@pytest.mark.parametrize("stranger", ["numbered", "backwards", "in_parts", "in_dicts", "of_lists", "plain_sequential"])
@pytest.mark.parametrize("axes", [AXES["pp"], AXES["zero"]], ids=["pp", "zero"])
def test_stages_and_shards_of_blocks(pool: Callable[[int], RankPool], stranger: str, axes: dict[str, Any]) -> None:
    run_alike(pool, named(stranger), axes)


def test_parts_that_do_not_divide_or_fail_stay_whole(pool: Callable[[int], RankPool]) -> None:
    plan = run_alike(pool, named("odd_parts"), AXES["tp"])
    (rule,) = [rule for rule in plan.sharding if "blocks.0-3" in rule.for_blocks]
    found = {tensor.tensor: tensor for tensor in rule.tensors}
    assert "tp" in found["even.0.weight"].dims
    assert "odd.0.weight" not in found or "17 does not divide over tp=2" in found["odd.0.weight"].reason
    assert "expected 24 features in a row, got 12" in found["shapes.0.weight"].reason


CONFIGS: dict[str, dict[str, Any]] = {
    "roberta": {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 34, "pad_token_id": 1, "vocab_size": 64,
    },
    "convnext": {
        "model_type": "convnext", "architectures": ["ConvNextForImageClassification"], "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1], "image_size": 64, "patch_size": 4, "num_labels": 4,
    },
    "mamba2": {
        "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": 16, "num_hidden_layers": 2,
        "vocab_size": 64, "state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    },
}  # fmt: skip


IMAGE_TEXT = ROOT / "tests" / "survey" / "image_text"


@pytest.mark.parametrize("kind", ["llava", "paligemma", "gemma3", "clip"])
def test_images_in_texts(pool: Callable[[int], RankPool], kind: str) -> None:
    """As many tokens stand for an image as its features take: the model itself counts them, on values that the batch has."""
    model = f"hf:{IMAGE_TEXT}/{kind}.json"
    source = resolve(model).small()
    assert source.example is not None
    assert not capture_source(source, "fp64").guesses
    assert torch.isfinite(source.objective.loss(call(source.build(), source.example(2)), source.example(2)))
    run_alike(pool, model, AXES["tp"])


def test_stages_of_a_model_that_counts_image_tokens(pool: Callable[[int], RankPool]) -> None:
    run_alike(pool, f"hf:{IMAGE_TEXT}/paligemma.json", AXES["pp"])


def test_images_of_a_form_of_their_own_are_refused(tmp_path: Path) -> None:
    config = json.loads((IMAGE_TEXT / "llava.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**config, "model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"]})
    )
    with pytest.raises(InputError, match="'llava_next': its images are of a form of their own"):
        resolve(f"hf:{file}")


@pytest.mark.parametrize("kind", CONFIGS)
def test_examples_of_a_config_are_what_the_model_takes(kind: str, tmp_path: Path) -> None:
    """With memory: an index beyond a table would raise."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[kind]))
    source = resolve(f"hf:{file}")
    for one in (source.small(), source) if kind == "roberta" else (source.small(),):
        assert one.example is not None
        call(one.build(), one.example(2))
    assert kind != "roberta" or (isinstance(source.shape, TextShape) and source.shape.seq == 32)


BUILT = ["drawn_elsewhere", "kept_in_the_file", "orthogonal_weights", "pruned_weights"]


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("stranger", BUILT)
def test_however_a_model_is_built(pool: Callable[[int], RankPool], stranger: str, axes: dict[str, Any]) -> None:
    run_alike(pool, named(stranger), axes)


@pytest.mark.parametrize(
    ("stranger", "said"),
    [("without_sizes", "module '1' (LazyLinear)"), ("with_a_past", "'turned'"), ("nested", "no tensors nested")],
)
def test_what_cannot_be_built_twice_is_refused(stranger: str, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        resolve(named(stranger))


def test_the_users_own_random_numbers_go_on() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    resolve(named("drawn_elsewhere")).build()
    assert random.random() == expected
