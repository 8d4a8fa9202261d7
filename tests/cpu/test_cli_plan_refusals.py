"""`meshwright plan` given what cannot be: what, where and what to do, before anything is searched, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import ASSETS, MODELS, hand_cluster
from command import Cli

from meshwright.core.errors import MeshwrightError
from meshwright.models.source import resolve

MODEL = MODELS["gpt"]
NAMED = "a100-80g-selene"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cluster", NAMED, "--hosts", 0], "--hosts is 0: "),
        (["--cluster", "local", "--hosts", 4], "'local' is this machine alone"),
        (["--cluster", NAMED, "--nproc", 4], "use --devices 4"),
        (["--cluster", NAMED, "--memory", "900GiB"], "more than the 80.00 GiB that a device"),
        (["--cluster", NAMED, "-o", "plan.yaml"], "a plan is saved as .json or .toml"),
        (["--cluster", NAMED, "-o", ASSETS.parent / "assets"], "a plan is saved as"),
        (
            ["--cluster", NAMED, "--no-offload", "--offload-share", 0.5],
            "nothing is to be offloaded, but a flag says how",
        ),
    ],
)
def test_refused_before_the_model_is_looked_at(here: Cli, flags: list[object], said: str) -> None:
    ended = here("plan", "no-such-model", *flags)
    assert ended.code == 2
    assert said in ended.err
    assert "no-such-model" not in ended.err


@pytest.mark.parametrize("verb", ["plan", "sweep"])
def test_a_place_that_cannot_be_written_is_said(here: Cli, tmp_path: Path, verb: str) -> None:
    cluster = hand_cluster(2).save(tmp_path / "cluster.json")
    (tmp_path / "taken").write_text("")
    file = tmp_path / "taken" / "out.json"
    ended = here(verb, MODEL, "--cluster", cluster, "--global-batch", 4, "-o", file)
    assert ended.code == 2
    assert f"error: {file} cannot be written" in ended.err


def test_the_hosts_of_a_file_are_kept_or_replaced(here: Cli, tmp_path: Path) -> None:
    """Without --hosts as many as it says; --hosts 1 is one, not what it says."""
    one = hand_cluster(2)
    file = msgspec.structs.replace(one, num_hosts=3, inter_host=one.intra_host).save(tmp_path / "three.toml")
    asked = ("plan", MODEL, "--cluster", file, "--devices", 5, "--global-batch", 5)
    assert here(*asked).code == 0
    assert "5 ranks were asked for, but 'hand' has 2 devices" in here(*asked, "--hosts", 1).err


def test_nothing_is_offloaded_for_a_gain_within_the_error(here: Cli) -> None:
    """A card with a known link to its host, and far more memory than the model needs; the fastest plan is a few percent faster."""
    asked = ("plan", "gpt:seq=4096", "--cluster", "rtx4090-24g", "--global-batch", 8, "--json")
    plain, fastest = (json.loads(here(*asked, *more).out) for more in ((), ("--prefer-fastest",)))
    assert plain["plan"]["offload"]["what"] == "none"
    assert "faster, less than the estimate's error" in plain["remark"]
    assert fastest["plan"]["offload"]["what"] == "optimizer"
    assert fastest["estimate"]["step_seconds"] < plain["estimate"]["step_seconds"]


CONFIG = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 61}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "llamma"}, "no model_type 'llamma': did you mean 'llama'?"),
        ({"hidden_size": "wide"}, "not a config of 'llama'"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3: give 1 or more"),
        ({"architectures": ["LlamaModel"]}, "'LlamaModel' has no head to train"),
        ({"architectures": ["BertForMaskedLM"]}, "cannot build 'BertForMaskedLM' of this config"),
    ],
)
def test_a_config_that_transformers_refuses(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | changed))
    with pytest.raises(MeshwrightError, match=said.replace("?", r"\?")):
        resolve(f"hf:{file}").build()


def test_a_folder_and_a_list_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"is a folder: name the config.json in it"):
        resolve(f"hf:{tmp_path}")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(MeshwrightError, match="has no 'model_type'"):
        resolve(f"hf:{tmp_path}/list.json")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gpt:layers=12,layers=13", "option 'layers' is given twice"),
        ("gpt:dropout=2", "dropout=2 is a share"),
        ("gpt:dropout=-0.1", "must be 0 or more"),
        ("moe:capacity=nan", "must be 0 or more"),
        ("moe:layers=2,every=3", "every=3 is more than layers=2: no block would have experts"),
    ],
)
def test_options_that_no_model_can_have(model: str, said: str) -> None:
    with pytest.raises(MeshwrightError, match=said):
        resolve(model)


def test_a_shrunk_model_keeps_some_experts() -> None:
    small = resolve("moe:layers=12,every=6").small().build()
    assert any("experts" in name for name, _ in small.named_parameters())
