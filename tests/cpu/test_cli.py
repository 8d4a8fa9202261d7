"""The command line as people use it: refusals with their exit codes, parity, and what each verb prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import ASSETS, MODELS, Case, hand_cluster, plan_of
from command import Cli, Ended

from meshwright.core.plan import Plan


def test_import_is_light() -> None:
    code = "import meshwright, sys; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Refusals: exit code 2, one line, before any rank is started.


def test_a_typo_in_a_key(here: Cli, settings: Callable[..., Path]) -> None:
    file = settings(plan={"global_batch": 8, "zeor": 2})
    assert here("train", file) == Ended(
        2, "", f"error: {file}: plan.zeor: unknown field 'zeor': did you mean 'zero'?\n"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": {"peek": 1}}, "learning_rate.peek: unknown field 'peek': did you mean 'peak'?"),
        ({"steps": "many"}, "steps: Expected `int`, got `str`"),
        ({"steps": 0}, "steps: Expected `int` >= 1"),
        ({"plan": {"zero": 4}}, "plan.zero: "),
        ({"plan": {"precision": "bf61"}}, "plan.precision: 'bf61' is not valid: did you mean 'bf16'?"),
        ({"plan": {"recompute": "ful"}}, "recompute 'ful' is not one of none, selective, full, every:K"),
        ({"plan": {"global_batch": 7}}, "global batch 7 does not divide over dp=2 ranks: use 6 or 8"),
        ({"plan": {"global_batch": 8, "microbatch": 3}}, "do not divide into microbatches of 3: use 2 or 4"),
        ({"model": "gtp:"}, "no model is called 'gtp': did you mean 'gpt'?"),
        ({"model": "gpt:layer=2"}, "has no option 'layer': did you mean 'layers'?"),
        ({"model": "nowhere.py:model"}, "nowhere.py: no such file"),
        ({"model": "hf:nowhere.json"}, "nowhere.json: no such file"),
        ({"model": f"{ASSETS}/models.py:raises"}, "raised RuntimeError: no such weights today (line"),
        ({"model": f"{ASSETS}/models.py:reads_memory"}, "module 'gate' (models.py:"),
        ({"model": f"{ASSETS}/models.py:alone"}, "returned a module alone: return (module, batch)"),
        ({"cluster": "nowhere.json"}, "nowhere.json: no such file"),
        ({"cluster": "a100-80g-selen"}, "no cluster is called 'a100-80g-selen': did you mean 'a100-80g-selene'?"),
        ({"plan_file": "nowhere.json"}, "nowhere.json: no such file"),
        ({"memory_bytes": "1KiB"}, "the plan needs"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_wrong_settings(here: Cli, settings: Callable[..., Path], tmp_path: Path, changes: Any, said: str) -> None:
    ended = here("train", settings(**changes))
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists(), "a refused run left a folder"


def test_a_data_path_that_is_missing(cli: Cli, settings: Callable[..., Path]) -> None:
    ended = cli("train", settings(data={"source": "text:/nowhere"}, model=MODELS["gpt"]))
    assert ended.code in (1, 2)
    assert "no such file or folder: /nowhere" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "nowhere.toml"], "nowhere.toml: no such file"),
        (["train", "settings.json"], "settings are read from a .toml file"),
        (["report", "nowhere"], "nowhere is not a run folder: it has no settings.toml"),
        (["capture", "gpt:layers=x"], "option layers='x' is not a whole number"),
        (["estimate", MODELS["gpt"], "--cluster", "h100-80g-mosaic", "--zero", "5"], "zero"),
        (["plan", MODELS["gpt"], "--cluster", "nowhere"], "no cluster is called 'nowhere'"),
        (["plan", MODELS["gpt"], "--plan", "plan.json"], "--plan gives a whole plan, and this verb searches one"),
        (
            ["parity", MODELS["gpt"], "--nproc", "2", "--global-batch", "5"],
            "does not divide over dp=2 ranks: use 4 or 6",
        ),
        (["probe", "--device", "gpu"], "--device gpu: "),
        (["probe", "--nproc", "1000"], "--nproc 1000: this machine has"),
        (["probe", "--nproc", "0"], "--nproc is 0: "),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_arguments(here: Cli, arguments: list[str], said: str) -> None:
    ended = here(*arguments)
    assert ended.code in (1, 2)
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_another_number_of_ranks_than_the_plan(here: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    plan = plan_of(Case("odd", precision="fp32"), 2).save(tmp_path / "plan.json")
    ended = here(
        "train", settings(cluster=str(hand_cluster(4).save(tmp_path / "four.json"))), "--plan", plan, "--nproc", 4
    )
    assert ended == Ended(2, "", f"error: {plan} is for 2 ranks, but 4 were asked for: use --nproc 2\n")


def test_a_plan_of_another_model(here: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    plan = plan_of(Case("gpt", precision="fp32"), 2).save(tmp_path / "plan.json")
    ended = here("train", settings(), "--plan", plan)
    assert ended.code == 2
    assert f"{plan} was made for another model (gpt:layers=2" in ended.err


def test_nothing_to_resume(here: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    ended = here("train", settings(), "--resume")
    assert ended.code == 2
    assert f"error: {tmp_path}/run holds no checkpoint to resume from: start it without --resume\n" == ended.err


def test_a_folder_that_is_not_a_run_is_left_alone(here: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("three years of work")
    ended = here("train", settings())
    assert ended.code == 2
    assert "exists and is not a run folder: choose another with --out" in ended.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


# Parity.


def test_parity_holds(cli: Cli) -> None:
    ended = cli("parity", MODELS["gpt"], "--nproc", 2, "--zero", 3, "--steps", 2, "--json")
    assert ended.code == 0, ended.err
    said = ended.json
    assert said["ok"] is True
    assert said["first_difference"] is None
    assert 0 <= said["max_loss_difference"] < 1e-12
    assert 0 <= said["max_gradient_difference"] < 1e-10
    assert "parity holds" in ended.err


def test_parity_fails_for_a_model_that_draws_from_the_operating_system(cli: Cli) -> None:
    """On one rank that takes the batch at once: where it is cut, a loss that is no mean of its parts' is refused before."""
    assert cli("parity", f"{ASSETS}/models.py:noisy", "--nproc", 2, "--steps", 1, "--json").code == 2
    ended = cli("parity", f"{ASSETS}/models.py:noisy", "--nproc", 1, "--steps", 1, "--json")
    assert ended.code == 1
    said = ended.json
    assert said["ok"] is False
    assert said["first_difference"].startswith("step 0: loss differs by")
    assert said["max_loss_difference"] > 0
    assert "parity FAILS: step 0: loss differs by" in ended.err


# Planning.


def test_plan_as_json(here: Cli, tmp_path: Path) -> None:
    saved = tmp_path / "plan.toml"
    ended = here("plan", MODELS["gpt"], "--cluster", "h100-80g-mosaic", "--global-batch", 16, "--json", "-o", saved)
    assert ended.code == 0, ended.err
    said = ended.json
    assert said.keys() >= {"plan", "estimate", "search_seconds", "runners_up"}
    assert said["runners_up"]
    assert all(other.keys() == {"plan", "step_seconds", "peak_bytes", "fits", "reason"} for other in said["runners_up"])
    plan = Plan.load(saved)
    assert plan == Plan.from_json(json.dumps(said["plan"]))
    assert plan.global_batch == 16
    again = here(
        "estimate", MODELS["gpt"], "--cluster", "h100-80g-mosaic", "--plan", saved, "--devices", plan.world, "--json"
    )
    assert again.json == said["estimate"]


def test_estimate_as_json(here: Cli, tmp_path: Path) -> None:
    cluster = hand_cluster(2).save(tmp_path / "cluster.json")
    ended = here("estimate", MODELS["gpt"], "--cluster", cluster, "--zero", 2, "--json")
    assert ended.json.keys() >= {
        "step_seconds", "time_seconds", "peak_bytes", "memory_bytes", "host_bytes", "tokens_per_second",
        "model_flops_utilisation", "fits",
    }  # fmt: skip
    assert sum(ended.json["time_seconds"].values()) == pytest.approx(ended.json["step_seconds"])
    assert sum(ended.json["memory_bytes"].values()) == ended.json["peak_bytes"]


def test_a_cluster_that_lacks_a_rate_is_refused(here: Cli, tmp_path: Path) -> None:
    """A file written by hand, or by an older version: said in words, not as a KeyError."""
    whole = hand_cluster(2)
    rates = tuple(rate for rate in whole.device.rates if rate.kind != "reduction")
    partial = msgspec.structs.replace(whole, device=msgspec.structs.replace(whole.device, rates=rates))
    ended = here("estimate", MODELS["gpt"], "--cluster", partial.save(tmp_path / "old.json"))
    assert ended.code == 2
    assert "reduction" in ended.err


def test_a_plan_that_does_not_fit_says_by_how_much(here: Cli) -> None:
    ended = here("plan", MODELS["gpt"], "--cluster", "h100-80g-mosaic", "--memory", "1KiB")
    assert ended.code == 2
    assert re.search(r"error: none of \d+ candidates fits 1\.00 KiB per device", ended.err)
    assert "too much, most of it" in ended.err


def test_capture_as_json(here: Cli, tmp_path: Path) -> None:
    ended = here("capture", MODELS["gpt"], "--samples", 3, "--json", "-o", tmp_path / "graph.json")
    said = ended.json
    assert said.keys() == {
        "num_parameters", "flops", "activation_bytes", "activation_bytes_by_recompute", "blocks", "guesses",
        "capture_seconds", "peak_host_bytes",
    }  # fmt: skip
    assert [block["name"] for block in said["blocks"]][-1] == "head"
    for figure in ("num_parameters", "flops"):
        assert sum(block[figure] for block in said["blocks"]) == said[figure]
    for recompute in ("none", "selective", "full"):
        parts = [block["activation_bytes_by_recompute"][recompute] for block in said["blocks"]]
        assert sum(parts) == said["activation_bytes_by_recompute"][recompute]
    assert said["activation_bytes_by_recompute"]["full"] < said["activation_bytes"]
    assert said["guesses"] == []
    assert said["peak_host_bytes"] > 2**26
    assert said["flops"] == 3 * (6 * (2 * 12 * 32**2 + 61 * 32) * 16 + 2 * 14 * 16**2 * 32)


def test_capture_as_a_table(here: Cli) -> None:
    said = here("capture", MODELS["gpt"], "--precision", "bf16").out
    assert "blocks.0-1" in said
    assert "kept, selective" in said
    assert "guesses" not in said


def test_capture_lists_its_guesses(here: Cli) -> None:
    said = here("capture", f"{ASSETS}/models.py:data_dependent")
    assert re.search(r"gate +│ models\.py:\d+ │ the value of a bool tensor │ False", said.out)
    assert said.err == ""


def test_models_as_json(here: Cli) -> None:
    said = here("models", "--json").json
    assert said.keys() == {"gpt", "llama", "moe", "bert", "t5", "vit", "coatnet", "resnet", "mlp"}
    assert said["gpt"]["options"]["layers"] == 12


def test_version_and_help(here: Cli) -> None:
    import meshwright

    assert here("--version").out.strip() == meshwright.__version__
    said = here("train", "--help").out
    for flag in ("--nproc", "--zero", "--global-batch", "--resume", "--json", "--plan"):
        assert flag in said


def test_brackets_of_others_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Words of torch and gloo name files in brackets: they are no markup."""
    from meshwright.jobs.output import make_console

    make_console(as_json=False).print("[/src/gloo/transport/tcp/pair.cc:144] no connection [/closed]")
    assert capsys.readouterr().out.strip() == "[/src/gloo/transport/tcp/pair.cc:144] no connection [/closed]"


def test_what_a_rank_refuses_ends_the_command_as_a_refusal(cli: Cli, tmp_path: Path) -> None:
    """Exit code 2, as before ranks start; any other error of a rank is 1."""
    (tmp_path / "net.py").write_text(
        "import os, torch\n"
        "def refusing():\n"
        "    if 'RANK' in os.environ:\n"
        "        raise RuntimeError('no such device')\n"
        "    return torch.nn.Linear(4, 4), (torch.randn(4, 4), torch.randn(4, 4))\n"
    )
    ended = cli("parity", "net.py:refusing", "--nproc", 2, "--steps", 1, "--device", "cpu")
    assert ended.code == 2
    assert "net.py:refusing raised RuntimeError: no such device" in ended.err
