"""`meshwright plan` and `meshwright sweep` as people use them, inside this process: no rank is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import ASSETS, MODELS, hand_cluster
from command import Cli

from meshwright.core.plan import Plan

CONFIGS = ASSETS / "configs"
MODEL = MODELS["gpt"]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return hand_cluster(4).save(tmp_path / "cluster.json")


def test_one_screen(here: Cli, cluster: Path) -> None:
    said = here("plan", MODEL, "--cluster", cluster, "--global-batch", 16, "--precision", "fp32")
    assert said.code == 0, said.err
    assert len(said.out.splitlines()) <= 40
    assert "4-way data parallel inside the host" in said.out
    assert " candidates" in said.out
    assert "runners-up, by what they do otherwise" in said.out


def test_the_words_are_in_the_json(here: Cli, cluster: Path) -> None:
    said = here("plan", MODEL, "--cluster", cluster, "--global-batch", 16, "--devices", 2, "--zero", 1, "--json").json
    assert said["words"][0].startswith("2-way data parallel")
    assert said["num_candidates"] >= len(said["runners_up"]) + 1
    assert said["plan"]["mesh"]["dp"] == 2


def test_nothing_fits(here: Cli, cluster: Path) -> None:
    said = here("plan", MODEL, "--cluster", cluster, "--global-batch", 16, "--memory", "100KiB", "--json")
    assert said.code == 2
    assert "comes nearest" in said.err
    assert "what binds: memory of rank " in said.err
    found = said.json
    assert found["fits"] is False
    assert all(way["estimate"]["fits"] for way in found["ways_out"])
    assert any("in place of --memory 100.00 KiB" in way["words"] for way in found["ways_out"])


@pytest.fixture
def two_plans(here: Cli, cluster: Path, tmp_path: Path) -> tuple[Path, Path]:
    files = tmp_path / "a.json", tmp_path / "b.toml"
    for file, zero in zip(files, (0, 3), strict=True):
        given = ("--global-batch", 16, "--dp", 4, "--microbatch", 4, "--recompute", "none", "--zero", zero)
        assert here("plan", MODEL, "--cluster", cluster, *given, "-o", file).code == 0
    return files


def test_what_differs(here: Cli, two_plans: tuple[Path, Path]) -> None:
    said = here("plan", "--diff", *two_plans)
    assert said.code == 0, said.err
    assert "ZeRO" in said.out
    assert "add --cluster" in said.out
    assert here("plan", "--diff", *two_plans, "--json").json == {
        "differences": [{"part": "ZeRO", "first": "0", "second": "3"}]
    }
    assert "the plans are the same" in here("plan", "--diff", two_plans[0], two_plans[0]).out


def test_what_a_difference_costs(here: Cli, two_plans: tuple[Path, Path], cluster: Path) -> None:
    """The model is named by the plans themselves."""
    said = here("plan", "--diff", *two_plans, "--cluster", cluster, "--json")
    changes = {change["figure"]: change for change in said.json["changes"]}
    first, second = said.json["estimates"]
    assert changes["step_seconds"] == {
        "figure": "step_seconds", "first": first["step_seconds"], "second": second["step_seconds"],
    }  # fmt: skip
    assert changes["memory_bytes.optimizer_state"]["second"] < changes["memory_bytes.optimizer_state"]["first"]
    assert "× as fast as" in said.err


def test_a_plan_without_a_model_is_compared_with_one(here: Cli, two_plans: tuple[Path, Path], cluster: Path) -> None:
    import msgspec

    nameless = msgspec.structs.replace(Plan.load(two_plans[0]), model="", graph="").save(
        two_plans[0].with_name("c.json")
    )
    said = here("plan", "--diff", nameless, two_plans[1], "--cluster", cluster)
    assert said.code == 2
    assert "does not say which model it is for" in said.err
    assert here("plan", MODEL, "--diff", nameless, two_plans[1], "--cluster", cluster).code == 0


def test_from_deepspeed(here: Cli, cluster: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        json.dumps({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    )
    said = here("plan", MODEL, "--cluster", cluster, "--from-deepspeed", config, "--json")
    assert said.code == 0, said.err
    found = said.json
    yours, best = found["configuration"]["plan"], found["plan"]
    assert (yours["zero"], yours["microbatch"], yours["num_microbatches"]) == (3, 1, 4)
    assert (best["global_batch"], best["precision"]) == (16, "fp32")
    first, second = found["estimates"]
    assert second["step_seconds"] < first["step_seconds"]
    assert "the search would do better" in said.err


def test_from_accelerate(here: Cli, tmp_path: Path) -> None:
    eight = hand_cluster(8).save(tmp_path / "eight.json")
    file = CONFIGS / "accelerate-megatron.yaml"
    said = here("plan", MODEL, "--cluster", eight, "--from-accelerate", file, "--global-batch", 16, "--json")
    assert said.code == 0, said.err
    yours = said.json["configuration"]["plan"]
    assert (yours["mesh"]["tp"], yours["mesh"]["pp"], yours["mesh"]["dp"]) == (2, 2, 2)
    assert (yours["precision"], yours["num_microbatches"], yours["microbatch"]) == ("bf16", 4, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "no MODEL was given"),
        (["plan", "--diff", "a.json", "b.json", "--from-deepspeed", "c.json"], "ask one at a time"),
        (["plan", "--diff", "a.json", "b.json"], "a.json: no such file"),
        (["plan", "--diff", "a.json", "b.json", "--tp", 2], "--diff compares two files as they are: leave plan flags"),
        (["plan", MODEL, "--no-offload", "--offload", "optimizer"], "--no-offload and --offload optimizer contradict"),
        (["plan", MODEL, "--cluster", "a100-80g-selene", "--search", "jiont"], "no search is called 'jiont': did you mean 'joint'"),
        (["plan", MODEL, "--from-accelerate", CONFIGS / "accelerate-fsdp.yaml", "--cluster", "a100-80g-selene", "--hosts", 1],
         "starts 16 processes, but 'a100-80g-selene' with 1 hosts has 8 devices: add --hosts"),
        (["sweep", MODEL, "--hosts", "1,2", "--global-batch", "8,16"], "are both lists: sweep one"),
        (["sweep", MODEL, "--hosts", "2", "-o", "sweep.png"], "a sweep is saved as .html, .csv, .json"),
        (["sweep", MODEL, "--plan", "plan.json"], "this verb searches one at each point"),
    ],
)  # fmt: skip
def test_questions_that_cannot_be_answered(here: Cli, arguments: list[object], said: str) -> None:
    ended = here(*arguments)
    assert ended.code == 2
    assert said in ended.err


def test_a_sweep_over_hosts(here: Cli, tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    given = ("--hosts", "1..2", "--global-batch", 32, "--zero", 1, "--recompute", "none", "--price", 2.5)
    said = here("sweep", MODEL, "--cluster", "a100-80g-selene", *given, "-o", page, "--json")
    assert said.code == 0, said.err
    found = said.json
    assert [point["num_devices"] for point in found["points"]] == [8, 16]
    assert all(point["money_per_1e9_tokens"] > 0 for point in found["points"])
    assert found["cheapest"] in (0, 1)
    assert "fastest: " in said.err
    assert "<svg" in page.read_text()


def test_a_sweep_shows_where_nothing_fits(here: Cli, cluster: Path, tmp_path: Path) -> None:
    table = tmp_path / "sweep.csv"
    given = ("--global-batch", "4,64", "--microbatch", 4, "--dp", 1, "--recompute", "none", "--memory", "1KiB")
    said = here("sweep", MODEL, "--cluster", cluster, *given, "-o", table)
    assert said.code == 0, said.err
    assert "nothing fits at any point" in said.out
    assert len(table.read_text().splitlines()) == 3
    assert table.read_text().count("over 1.00 KiB") == 2


def test_help_teaches_by_examples(here: Cli) -> None:
    for verb in ("plan", "sweep"):
        assert f"meshwright {verb} MODEL --cluster a100-80g-selene" in here(verb, "--help").out
