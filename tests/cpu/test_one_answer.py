"""Python and the command line answer alike: the same plan, the same figures, the same words of what is wrong."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from command import Cli
from torch import nn

import meshwright as mw
from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchProgress
from meshwright.interop.flag_names import FLAG_NAMES
from meshwright.jobs.summary import RunSummary
from meshwright.planner.flags import PlanFlags

GPT = "gpt:layers=12,hidden=768,heads=12,seq=1024,vocab=50304"
SMALL = "gpt:layers=4,hidden=256,heads=4,seq=128,vocab=1024"
SELENE = "a100-80g-selene"
PLANNED: list[tuple[str, str, dict[str, Any]]] = [
    (GPT, SELENE, {"global_batch": 64}),
    (GPT, SELENE, {"global_batch": 64, "devices": 2}),
    (GPT, SELENE, {"hosts": 2, "global_batch": 128, "prefer_fastest": True}),
    (GPT, SELENE, {"global_batch": 64, "precision": "fp32"}),
    (GPT, SELENE, {"global_batch": 64, "precision": "fp16", "zero": 3}),
    (GPT, SELENE, {"global_batch": 64, "memory": "6GiB"}),
    (SMALL, SELENE, {}),
    (SMALL, SELENE, {"tp": 2, "sequence_parallel": True, "global_batch": 32}),
    (SMALL, SELENE, {"pp": 4, "schedule": "zb", "global_batch": 32, "microbatch": 1}),
    (SMALL, SELENE, {"recompute": "every:2", "compile": False, "global_batch": 32}),
    (SMALL, SELENE, {"offload": "none", "search": "profile", "global_batch": 32}),
    ("mlp", "h200-single", {"offload": "optimizer", "offload_share": 0.5, "global_batch": 8}),
    ("vit", SELENE, {"global_batch": 16}),
    ("moe", SELENE, {"ep": 2, "global_batch": 16}),
]
ESTIMATED: list[tuple[str, str, dict[str, Any]]] = [
    (SMALL, SELENE, {"global_batch": 64}),
    (SMALL, SELENE, {"tp": 2, "pp": 2, "global_batch": 64, "microbatch": 4}),
    (SMALL, SELENE, {"zero": 2, "precision": "bf16", "devices": 4, "global_batch": 16}),
    (SMALL, SELENE, {"hosts": 2, "cp": 2, "context": "ring", "global_batch": 16}),
    ("bert", "h200-single", {"recompute": "full", "global_batch": 8}),
]


def flags_of(asked: dict[str, Any]) -> list[str]:
    """Keywords as flags."""
    found: list[str] = []
    for name, value in asked.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{name.replace('_', '-')}")
        else:
            found += [flag, str(value)]
    return found


def plain(value: Any) -> Any:
    """As it reads in JSON, without what a clock has said."""
    found = json.loads(msgspec.json.encode(value))
    if isinstance(found, dict):
        found.pop("search_seconds", None)
    return found


@pytest.mark.parametrize(("model", "cluster", "asked"), PLANNED)
def test_plan(here: Cli, model: str, cluster: str, asked: dict[str, Any]) -> None:
    said = here("plan", model, "--cluster", cluster, *flags_of(asked), "--json").json
    result = mw.plan(model, cluster, **asked)
    for name in set(result.__struct_fields__) - {"format", "search_seconds"}:
        assert plain(getattr(result, name)) == said[name], name
    assert (result.gap, result.complete) == (said["gap"], said["complete"])


@pytest.mark.parametrize(("model", "cluster", "asked"), ESTIMATED)
def test_estimate(here: Cli, model: str, cluster: str, asked: dict[str, Any]) -> None:
    said = here("estimate", model, "--cluster", cluster, *flags_of(asked), "--json").json
    assert plain(mw.estimate(model, cluster, **asked)) == said


def test_sweep(here: Cli) -> None:
    said = here("sweep", SMALL, "--cluster", SELENE, "--hosts", "1,2", "--global-batch", "64", "--json").json
    found = mw.sweep(SMALL, SELENE, hosts=[1, 2], global_batch=64)
    assert [plain(point.plan) for point in found.points] == [point["plan"] for point in said["points"]]


def test_parity(cli: Cli) -> None:
    asked = ("--nproc", "2", "--tp", "2", "--steps", "2")
    said = cli("parity", "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=30", *asked, "--json").json
    found = mw.parity("gpt:layers=2,hidden=16,heads=2,seq=8,vocab=30", nproc=2, tp=2, steps=2)
    assert found.ok
    assert plain(found) == said


PROGRAM = """
import sys
import meshwright as mw

if __name__ == "__main__":
    found = mw.train(sys.argv[1], out=sys.argv[2], zero=1, steps=3, quiet=True)
    again = mw.train(found.run_folder, resume=True, steps=4, quiet=True)
    print(found.to_json().replace(chr(10), ""))
    print(again.loss, again.num_steps)
"""


def test_train(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    file = settings()
    said = cli("train", file, "--zero", "1", "--steps", "3", "--json").json
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = cli(file, tmp_path / "again", launcher=("-m", "program"))
    assert ended.code == 0, ended.err
    assert ended.err == ""
    first, second = ended.out.splitlines()
    found = RunSummary.from_json(first, "what was printed")
    assert (found.loss, found.predicted_step_seconds) == (said["loss"], said["predicted_step_seconds"])
    assert (tmp_path / "again" / "plan.json").read_text() == (Path(said["run_folder"]) / "plan.json").read_text()
    assert second.endswith(" 4")


def test_a_module_is_planned_like_the_same_model_by_name() -> None:
    from meshwright.models.source import resolve

    source = resolve(SMALL)
    assert source.example is not None
    asked: dict[str, Any] = {"global_batch": 32, "tp": 2}
    named = mw.plan(SMALL, SELENE, **asked)
    module = mw.plan(source.build(), SELENE, batch=source.example(2), **asked)
    assert msgspec.structs.replace(module.plan, model=SMALL) == named.plan
    assert module.estimate == named.estimate


def test_a_module_is_at_parity_or_not() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    batch = (torch.randn(4, 8), torch.randint(4, (4,)))
    assert mw.parity(module, batch=batch, nproc=2, zero=2, steps=2).ok


def test_a_graph_is_planned_like_its_module() -> None:
    """In 16 bits a sharded plan runs another casting than the graph's: its module is captured once more."""
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    batch = (torch.randn(4, 8), torch.randint(4, (4,)))
    graph = mw.capture(module, batch, precision="bf16")
    for asked in ({}, {"zero": 3}):
        flags: dict[str, Any] = {"global_batch": 32, **asked}
        found, expected = (
            mw.plan(graph, SELENE, **flags),
            mw.plan(module, SELENE, batch=batch, precision="bf16", **flags),
        )
        assert (found.plan, found.estimate, found.claim) == (expected.plan, expected.estimate, expected.claim)
        assert mw.estimate(graph, SELENE, plan=found.plan, devices=found.plan.world) == found.estimate


def test_a_graph_is_planned_in_its_own_precision() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    graph = mw.capture(module, (torch.randn(4, 8), torch.randint(4, (4,))))
    assert mw.plan(graph, SELENE, global_batch=8).plan.precision == "fp32"
    with pytest.raises(InputError, match="captured in fp32"):
        mw.plan(graph, SELENE, global_batch=8, precision="bf16")


@pytest.mark.parametrize(
    ("verb", "keyword", "near"),
    [
        ("plan", "zeroo", "zero"),
        ("plan", "memry", "memory"),
        ("estimate", "microbtach", "microbatch"),
        ("sweep", "prize", "price"),
    ],
)
def test_a_misspelt_keyword_gets_the_nearest_name(verb: str, keyword: str, near: str) -> None:
    with pytest.raises(InputError, match=f"'{keyword}'.*'{near}'"):
        getattr(mw, verb)(SMALL, SELENE, **{keyword: 1})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("tensor_model_parallel_size", "tp"),
        ("zero_stage", "zero"),
        ("micro_batch_size", "microbatch"),
        ("bf16", "precision"),
        ("gradient_checkpointing", "recompute"),
        ("world_size", "devices"),
        ("nnodes", "hosts"),
    ],
)
def test_what_others_call_a_flag_is_answered_with_our_name(here: Cli, theirs: str, ours: str) -> None:
    with pytest.raises(InputError, match=f"'{theirs}'.* {ours} here"):
        mw.plan(SMALL, SELENE, **{theirs: 1})  # type: ignore[misc]
    option = "--" + theirs.replace("_", "-")
    ended = here("plan", SMALL, "--cluster", SELENE, option, 1)
    assert (ended.code, option in ended.err, f"--{ours}" in ended.err) == (2, True, True)


def test_names_of_others_stand_for_what_there_is() -> None:
    ours = {name.partition("=")[0] for name in FLAG_NAMES.values()}
    verb = {name for name in inspect.signature(mw.plan).parameters if name != "flags"}
    assert ours <= {*PlanRequest.__struct_fields__, *verb, "from_deepspeed", "from_accelerate"}
    assert not set(FLAG_NAMES) & {*PlanRequest.__struct_fields__, *verb}


def test_one_dash_is_one_too_few(here: Cli) -> None:
    assert "it is --tp here" in here("plan", SMALL, "-tp", 2).err


@pytest.mark.parametrize(
    ("verb", "asked"),
    [
        ("plan", {"devices": 0}),
        ("plan", {"devices": -1}),
        ("plan", {"hosts": -1}),
        ("plan", {"memory": "0GiB"}),
        ("estimate", {"devices": 0}),
        ("estimate", {"memory": "900GiB"}),
        ("sweep", {"price": -1.0}),
        ("plan", {"tp": 0}),
        ("plan", {"ends": "none"}),
    ],
)
def test_a_wrong_value_is_refused_in_the_same_words(here: Cli, verb: str, asked: dict[str, Any]) -> None:
    with pytest.raises(MeshwrightError) as refused:
        getattr(mw, verb)(SMALL, SELENE, **asked)
    assert here(verb, SMALL, "--cluster", SELENE, *flags_of(asked)).err == f"error: {refused.value}\n"


@pytest.mark.parametrize("asked", [{"devices": "8"}, {"hosts": 2.0}, {"memory": 1e9}, {"devices": True}])
def test_a_number_of_another_type_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="whole number"):
        mw.plan(SMALL, SELENE, **asked)


@pytest.mark.parametrize("asked", [{"steps": 0}, {"nproc": 0}, {"timeout": -1.0}, {"restarts": -1}, {"memory": 0}])
def test_a_run_is_not_begun_with_a_wrong_number(settings: Callable[..., Path], asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(asked))):
        mw.train(settings(), quiet=True, **asked)


def test_parity_is_not_begun_with_a_wrong_number() -> None:
    with pytest.raises(InputError, match="steps is 0"):
        mw.parity("gpt:layers=2,hidden=16,heads=2,seq=8,vocab=30", nproc=1, steps=0)


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (SMALL, {"batch": 1}),
        (nn.Linear(2, 2), {}),
        (5, {}),
        (SMALL, {"precision": "bf17"}),
        (SMALL, {"nproc": 2}),
        (SMALL, {"memory": "900GiB"}),
    ],
)
def test_what_contradicts_itself_is_refused(model: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(MeshwrightError):
        mw.plan(model, SELENE, **asked)


def test_keywords_are_the_plan_flags() -> None:
    assert set(PlanFlags.__annotations__) == set(PlanRequest.__struct_fields__)
    assert all(name in (mw.plan.__doc__ or "") for name in PlanRequest.__struct_fields__)


def test_a_search_says_how_far_it_is() -> None:
    seen: list[SearchProgress] = []
    result = mw.plan(SMALL, SELENE, global_batch=32, watch=seen.append)
    assert {progress.stage for progress in seen} >= {"first plans", "all plans"}
    best = [progress.best_seconds for progress in seen if progress.stage == "all plans" and progress.best_seconds]
    assert best == sorted(best, reverse=True)
    assert min(best) <= result.estimate.step_seconds
    assert all("costed" in progress.words for progress in seen)
