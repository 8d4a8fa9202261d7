"""From a folder of weights through a run under some plan to a folder that transformers loads, and what stops an export."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cases import hand_cluster
from command import Cli, losses
from pool import RankPool, this_rank
from test_pretrained import CONFIGS, saved

from meshwright.core.cluster import Link
from meshwright.core.plan import Plan
from meshwright.models.source import resolve
from meshwright.runtime.apply import apply
from meshwright.training.checkpoint import restore
from meshwright.training.export import ExportError, export

Pools = Callable[[int], RankPool]
BYTES = 260
"""A vocabulary that the data fits in."""
DATA = {"source": "stdlib"}
"""Named, as a trained model's data must be."""


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(CONFIGS, "bytes", {**CONFIGS["tied"], "vocab_size": BYTES})
    folder = saved(tmp_path / "weights", "bytes")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def loss_of_checkpoint(model: str, run: Path) -> float:
    """By the run's own plan."""
    plan, source = Plan.load(run / "plan.json"), resolve(model)
    program = apply(
        source.build(), plan, optimizer=torch.optim.AdamW, objective=source.objective, device=this_rank().device,
    )  # fmt: skip
    restore(program, plan.graph, run / "checkpoints", this_rank())
    assert source.example is not None
    torch.manual_seed(3)
    return program.evaluate([source.example(plan.global_batch)])


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [({"zero": 3}, 1e-5), ({"pp": 2}, 1e-5), ({"zero": 2, "offload": "optimizer", "precision": "bf16"}, 1e-2)],
)
def test_there_and_back(
    cli: Cli, pool: Pools, settings: Callable[..., Path], weights: Path, tmp_path: Path, plan: dict[str, Any],
    tolerance: float,
) -> None:  # fmt: skip
    from transformers import AutoModelForCausalLM

    model = f"hf:{weights}/config.json"
    file = settings(model=model, weights=str(weights), data=DATA, steps=2, plan={"global_batch": 4, **plan})
    link = Link(bytes_per_second=1e9, origin="assumed")
    msgspec.structs.replace(hand_cluster(2), host_link=link, host_updates_per_second=1e9).save(
        tmp_path / "cluster.json"
    )
    run = tmp_path / "run"
    ended = cli("train", file)
    assert ended.code == 0, ended.err
    assert re.search(r"weights of .*: \d+ tensors, this rank read", ended.out)
    ended = cli("export", run, "-o", tmp_path / "out", "--shard", "50KB", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["step"] == 2
    assert "float32" in ended.json["dtypes"]
    assert ended.json["copied"] == ["tokenizer.json", "generation_config.json"]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert found.config.use_cache
    assert not torch.equal(found.lm_head.weight, AutoModelForCausalLM.from_pretrained(weights).lm_head.weight)
    source = resolve(model)
    assert source.example is not None
    torch.manual_seed(3)
    batch: Any = source.example(4)
    with torch.no_grad():
        loss = float(source.objective.loss(found(**batch), batch))
    assert pool(2).run(loss_of_checkpoint, model, run) == pytest.approx([loss] * 2, rel=tolerance)


def test_a_run_begins_where_its_weights_say(
    cli: Cli, settings: Callable[..., Path], weights: Path, tmp_path: Path
) -> None:
    """And one that is resumed does not begin there again."""
    first: dict[int, float] = {}
    for number, chosen in enumerate(({"weights": str(weights)}, {})):
        out = tmp_path / f"run{number}"
        file = settings(
            model=f"hf:{weights}/config.json", data=DATA, steps=1, plan={"global_batch": 4}, out=str(out), **chosen
        )
        ended = cli("train", file)
        assert ended.code == 0, ended.err
        first[number] = losses(out)[0][1]
    assert first[0] != first[1]
    file = settings(
        model=f"hf:{weights}/config.json",
        data=DATA,
        steps=2,
        plan={"global_batch": 4},
        out=str(tmp_path / "run0"),
        weights="nowhere",
    )
    ended = cli("train", file, "--resume")
    assert ended.code == 0, ended.err
    assert "weights of" not in ended.out


def test_refused_before_a_rank_starts(here: Cli, settings: Callable[..., Path], weights: Path, tmp_path: Path) -> None:
    ended = here("train", settings(model=f"hf:{weights}/config.json", weights=str(tmp_path / "nowhere"), data=DATA))
    assert ended.code
    assert "nowhere: no such folder" in ended.err
    wider = json.loads((weights / "config.json").read_text()) | {"intermediate_size": 64}
    (tmp_path / "wider.json").write_text(json.dumps(wider))
    ended = here("train", settings(model=f"hf:{tmp_path}/wider.json", weights=str(weights), data=DATA))
    assert "'model.layers.0.mlp.gate_proj.weight' is [64, 32] in this model and [48, 32] there" in " ".join(
        ended.err.split()
    )
    assert not (tmp_path / "run").exists()
    ended = here("export", tmp_path / "run", "-o", tmp_path / "out")
    assert "holds no checkpoint to export" in ended.err


def model_and_batch(folder: Path, kind: str = "tied") -> tuple[Any, Any]:
    source = resolve(f"hf:{saved(folder, kind)}/config.json")
    assert source.example is not None
    torch.manual_seed(3)
    return source.build(), source.example(2)


@pytest.mark.parametrize("kind", ["tied", "gpt2", "mixtral", "bert", "vit"])
def test_rounded_on_the_way_out(tmp_path: Path, kind: str) -> None:
    module, batch = model_and_batch(tmp_path / "weights", kind)
    found = export(module, batch, tmp_path / "out", torch.bfloat16, 50_000, None)
    assert found.largest_difference <= 1e-2
    assert found.num_bytes == 2 * sum(one.numel() for one in module.parameters())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("a weight", "tensor 'model.norm.weight' is not the one that was trained"),
        ("the config", "output 'loss' of the export differs|output 'logits' of the export differs"),
        ("the tie", "missing keys"),
    ],
)
def test_an_export_that_differs_fails(tmp_path: Path, spoil: str, words: str) -> None:
    """Whatever is wrong with what was written, nothing is left of it."""
    module, batch = model_and_batch(tmp_path / "weights")
    write = module.save_pretrained

    def save(folder: Path, **options: Any) -> None:
        if spoil == "a weight":
            with torch.no_grad():
                module.model.norm.weight[3] += 1e-6
        write(folder, **options)
        if spoil == "a weight":
            with torch.no_grad():
                module.model.norm.weight[3] -= 1e-6
        config = json.loads((folder / "config.json").read_text())
        if spoil == "the config":
            config["rms_norm_eps"] = 0.1
        if spoil == "the tie":
            config["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(config))

    module.save_pretrained = save
    with pytest.raises(ExportError, match=words):
        export(module, batch, tmp_path / "out", None, 50_000, None)
    assert {path.name for path in tmp_path.iterdir()} == {"weights"}


def test_nothing_is_written_over(tmp_path: Path) -> None:
    module, batch = model_and_batch(tmp_path / "weights")
    with pytest.raises(ValueError, match="exists already"):
        export(module, batch, tmp_path / "weights", None, 50_000, None)
