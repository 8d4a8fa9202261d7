"""A resumed run is the same run: bit-equal losses for twenty further steps, and `--verify` notices when it is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Cli, losses
from msgspec.structs import replace
from pool import RankError, RankPool, this_rank
from rich.console import Console

from meshwright.core.graph import identity
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.models.parameters import list_parameters
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.training import checkpoint
from meshwright.training.data import open_streams
from meshwright.training.folder import RunFolder
from meshwright.training.job import Job
from meshwright.training.metrics import read_metrics
from meshwright.training.run import build_program, run
from meshwright.training.settings import CheckpointSettings, DataSettings, LearningRateSettings, Settings
from meshwright.training.stream import Slice

Pools = Callable[[int], RankPool]
MODEL = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=256,dropout=0.3"
HALF, WHOLE = 20, 40
PLANS = {
    "one": (1, {}),
    "dp2 zero3": (2, {"zero": 3}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "tp2": (2, {"tp": 2}),
    "dp2 bf16": (2, {"precision": "bf16"}),
    "dp2 fp16": (2, {"precision": "fp16"}),
    "dp2 zero3 streamed": (2, {"zero": 3, "offload": "parameters", "recompute": "full"}),
    "dp2 zero2 offload": (2, {"zero": 2, "offload": "optimizer"}),
    "dp2 offload": (2, {"offload": "optimizer"}),
    "one delayed": (1, {"offload": "optimizer", "offload_delayed": True}),
    "one delayed bf16": (
        1,
        {"offload": "optimizer", "offload_delayed": True, "precision": "bf16", "offload_share": 0.5},
    ),
    "dp2 zero2 delayed": (2, {"offload": "optimizer", "offload_delayed": True, "zero": 2}),
}
WARMUP = 5
"""Steps before delayed updates are late: the checkpoint is behind them."""


def settings_of(folder: Path, name: str) -> Settings:
    return Settings(
        model=MODEL,
        steps=WHOLE,
        nproc=PLANS[name][0],
        device="cpu",
        out=str(folder),
        tensorboard=False,
        data=DataSettings(validation_every=7, validation_batches=1),
        learning_rate=LearningRateSettings(peak=1e-2, warmup_steps=5),
    )


def plan_of(name: str) -> Plan:
    from cases import graph_of

    from meshwright.measure.checking.small_plan import try_sharding

    num_ranks, asked = PLANS[name]
    request = PlanRequest(**{"global_batch": 8, "microbatch": 4, **asked})
    plan = plain_plan(request, graph_of(MODEL), num_ranks, "tests")
    plan = replace(plan, offload=replace(plan.offload, warmup_steps=WARMUP))
    return try_sharding(plan, resolve(MODEL))


def train_on_rank(
    folder: Path, name: str, plan: Plan, resumes: bool, verify: bool = False, every: int = HALF, random: str = "rank"
) -> str:
    run_folder = RunFolder(folder)
    run_folder.checkpoints.mkdir(parents=True, exist_ok=True)
    console = Console(record=True, file=(folder / f"said-{this_rank().number}").open("w"), width=1000)
    checkpoints = CheckpointSettings(every=every, keep=3)
    settings = replace(settings_of(folder, name), checkpoint=checkpoints, random=random)
    run(Job(settings, plan, run_folder, resumes, verify), this_rank(), None, console)
    return console.export_text()


def half_of(whole: Path, half: Path) -> Path:
    """The run as a crash in its second half would have left it."""
    shutil.copytree(whole, half)
    shutil.rmtree(half / f"checkpoints/step-{WHOLE:08d}")
    return half


@pytest.mark.parametrize("name", PLANS)
def test_twenty_further_steps_are_the_same(pool: Pools, tmp_path: Path, name: str) -> None:
    """Dropout, data order, learning rate, gradient norm: all that is written down, but the time it took."""
    plan = plan_of(name)
    whole, ranks = tmp_path / "whole", pool(plan.world)
    ranks.run(train_on_rank, whole, name, plan, False)
    half = half_of(whole, tmp_path / "half")
    said = ranks.run(train_on_rank, half, name, plan, True, True)[0]
    assert said.startswith(f"verified: step {HALF} was replayed; loss ")
    assert " equal what was recorded" in said
    expected, found = facts(whole), facts(half)
    assert len(expected) >= WHOLE
    assert found == expected
    assert len({line["loss"] for line in found if "loss" in line}) == WHOLE


def test_a_checkpoint_changes_nothing_under_late_updates(pool: Pools, tmp_path: Path) -> None:
    """What is late at a checkpoint stays late: the losses are those of a run that saved nothing on its way."""
    plan = plan_of("one delayed")
    for folder, every in ((tmp_path / "saved", 7), (tmp_path / "unsaved", 0)):
        pool(1).run(train_on_rank, folder, "one delayed", plan, False, False, every)
    assert facts(tmp_path / "saved") == facts(tmp_path / "unsaved")


def test_late_updates_go_on_late_on_other_ranks(pool: Pools, tmp_path: Path) -> None:
    """Of two ranks with shards on one: the next loss is that of the older parameters, not of the newest."""
    whole = tmp_path / "whole"
    pool(2).run(train_on_rank, whole, "dp2 zero2 delayed", plan_of("dp2 zero2 delayed"), False)
    expected = next_loss(whole)
    late, newest = (pool(1).run(loss_on_rank, whole, plan_of(name))[0] for name in ("one delayed", "one"))
    assert late == pytest.approx(expected, rel=1e-6)
    assert newest != pytest.approx(expected, rel=1e-6)


def test_dropout_by_sample_goes_on_the_same_on_other_ranks(pool: Pools, tmp_path: Path) -> None:
    """Two ranks with dropout, resumed on one: the losses of the run that went on on two, to rounding; `--verify` sees it too."""
    whole, name = tmp_path / "whole", "dp2 zero3"
    pool(2).run(train_on_rank, whole, name, plan_of(name), False, False, HALF, "sample")
    half = half_of(whole, tmp_path / "half")
    said = pool(1).run(train_on_rank, half, "one", plan_of("one"), True, True, HALF, "sample")[0]
    assert said.startswith(f"verified: step {HALF} was replayed; loss ")
    expected, found = ([line["loss"] for line in facts(folder) if "loss" in line] for folder in (whole, half))
    assert len(found) == WHOLE
    assert found[HALF:] == pytest.approx(expected[HALF:], rel=1e-4)


def next_loss(folder: Path) -> float:
    found = json.loads((folder / f"checkpoints/step-{WHOLE:08d}/progress.json").read_text())["next_loss"]
    return float(found)


def loss_on_rank(folder: Path, plan: Plan) -> float:
    """Of the batch after the last checkpoint, under another plan."""
    source = resolve(MODEL)
    program = build_program(
        Job(settings_of(folder, "one"), plan, RunFolder(folder)), source.build(), source, this_rank(), None
    )
    progress = checkpoint.restore(program, "", folder / "checkpoints", this_rank())
    train, _ = open_streams(settings_of(folder, "one").data, source, plan.global_batch, Slice(0, 1), 0)
    train.seek(progress.cursor)
    found = program.evaluate([train.next()])
    program.close()
    return found


def facts(folder: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second", "memory_bytes")
    return [
        {name: value for name, value in line.items() if name not in timed}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize("recorded", ["loss", "gradient_norm"])
def test_another_run_is_not_taken_for_the_same(pool: Pools, tmp_path: Path, recorded: str) -> None:
    """A recorded figure that differs in its last digit: refused, and nothing is changed."""
    whole = tmp_path / "whole"
    pool(1).run(train_on_rank, whole, "one", plan_of("one"), False)
    half = half_of(whole, tmp_path / "half")
    lines = [json.loads(line) for line in (half / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == HALF and recorded in line:
            line[recorded] *= 1 + 1e-15
    (half / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file() and "said" not in path.name}
    with pytest.raises(RankError, match="this is not the run that was saved: step 20 was replayed, and its"):
        pool(1).run(train_on_rank, half, "one", plan_of("one"), True, True)
    after = {path: path.read_bytes() for path in half.rglob("*") if path.is_file() and "said" not in path.name}
    assert after == before


def test_nothing_to_compare_with_is_said(pool: Pools, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    pool(1).run(train_on_rank, whole, "one", plan_of("one"), False)
    half = half_of(whole, tmp_path / "half")
    lines = (half / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["step"] < HALF]
    (half / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))
    with pytest.raises(RankError, match=f"the run ended before it had written down step {HALF}"):
        pool(1).run(train_on_rank, half, "one", plan_of("one"), True, True)


def test_the_model_is_the_same() -> None:
    """The identity a checkpoint is compared by does not depend on weights."""
    one, other = (identity(list_parameters(resolve(MODEL).build())) for _ in range(2))
    assert one == other


# From the command line


def test_resume_by_the_run_folder_alone(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    file = settings(steps=6, checkpoint={"every": 3}, plan={"global_batch": 8, "zero": 2})
    whole = cli("train", file, "--json")
    assert whole.code == 0, whole.err
    expected = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")
    file.unlink()
    ended = cli("train", "--resume", "run", "--verify", "--json")
    assert ended.code == 0, ended.err
    assert "verified: step 3 was replayed; loss " in ended.err
    assert losses(tmp_path / "run") == expected
    longer = cli("train", "--resume", "run", "--steps", 8, "--nproc", 1, "--verify", "--json")
    assert longer.code == 0, longer.err
    assert "verified: the batch of step 6 was evaluated; loss " in longer.err
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "run is the folder of a run: go on with it by --resume, or give the settings of a new one"),
        (("--resume", "run", "--out", "other"), "a run is resumed in its own folder, run: leave --out away"),
        (("--resume", "runs/none"), "runs/none: no such run folder: give the one that --out named, or runs/NAME"),
        (("--resume", "."), ". is a folder, but not of a run: it holds no settings.toml"),
        (
            ("run/settings.toml", "--verify"),
            "--verify compares a resumed run with what was recorded: give --resume too",
        ),
        (("--resume", "run"), "run holds no checkpoint to resume from: start it without --resume"),
    ],
)
def test_what_is_refused(
    here: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    settings_of(folder.path, "one").save(folder.settings)
    ended = here("train", *arguments)
    assert (ended.code, ended.err) == (2, f"error: {words}\n")
