"""The command line as people use it: runs in processes of their own, signals, deaths, refusals with their exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import ASSETS, MODELS, ROOT, Case, hand_cluster, plan_of

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.trace import Trace
from meshwright.train.metrics import read_metrics
from meshwright.train.settings import Settings

PATIENCE_SECONDS = 120.0
TRAIN_KEYS = {
    "loss",
    "step_seconds",
    "tokens_per_second",
    "predicted_step_seconds",
    "predicted_peak_bytes",
    "measured_peak_bytes",
}
RUN_FILES = {"settings.toml", "plan.json", "estimate.json", "trace.json", "metrics.jsonl", "checkpoints"}


@dataclass(frozen=True)
class Ended:
    """How a process ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output."""
        (line,) = self.out.splitlines()
        return json.loads(line)


class Started:
    """A `meshwright` process and its ranks, all in one session, so that none outlives a test."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def end(self) -> Ended:
        try:
            out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            pytest.fail(f"did not end within {PATIENCE_SECONDS:.0f} s:\n{out}\n{err}")
        return Ended(self.process.returncode, out, err)

    def kill(self) -> None:
        for pid in [*self.ranks().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ranks(self) -> dict[int, int]:
        """Rank → process id of the children that are ranks."""
        found = {}
        for pid in children(self.process.pid):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            numbers = [int(item[5:]) for item in environment if item.startswith(b"RANK=")]
            if numbers:
                found[numbers[0]] = pid
        return found


def children(parent: int) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            yield int(status.parent.name)


Cli = Callable[..., Ended]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The machine is measured once for all tests."""
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start `meshwright ARGUMENTS` in an empty folder."""
    running: list[Started] = []

    def begin(*arguments: object, launcher: tuple[str, ...] = ("-m", "meshwright")) -> Started:
        command = [sys.executable, *launcher, *map(str, arguments)]
        running.append(Started(command, environment, tmp_path))
        return running[-1]

    yield begin
    for one in running:
        if one.process.poll() is None:
            one.kill()
            one.process.communicate()


@pytest.fixture
def cli(start: Callable[..., Started]) -> Cli:
    return lambda *arguments, **options: start(*arguments, **options).end()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str]) -> Cli:
    """Run a verb inside this process: quicker, for verbs that end before any rank is started."""
    from meshwright.cli import main

    def run(*arguments: object) -> Ended:
        monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
        monkeypatch.setattr(sys, "argv", ["meshwright", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        return Ended(int(code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Path]:
    """A settings file for a tiny model on a cluster that need not be measured; `plan={...}` and others put over it."""

    def write(**changes: Any) -> Path:
        cluster = hand_cluster(2).save(tmp_path / "cluster.json")
        base: dict[str, Any] = {
            "model": f"{ASSETS}/models.py:odd", "cluster": str(cluster), "nproc": 2, "steps": 4, "tensorboard": False,
            "plan": {"global_batch": 8}, "out": str(tmp_path / "run"),
        }  # fmt: skip
        path = tmp_path / "settings.toml"
        import tomli_w

        path.write_text(tomli_w.dumps({**base, **changes}))
        return path

    return write


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def wait_for(condition: Callable[[], bool], run: Started) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if run.process.poll() is not None:
            pytest.fail(f"ended too early: {run.end()}")
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# Training.


def test_import_is_light() -> None:
    code = "import meshwright, sys; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_train_the_example(cli: Cli, tmp_path: Path) -> None:
    """The first command of the README, from an empty cache: probe, search, train, compare."""
    ended = cli("train", ROOT / "examples/gpt-small.toml", "--nproc", 2, "--steps", 6, "--json")
    assert ended.code == 0, ended.err
    assert ended.json.keys() >= TRAIN_KEYS
    folder = tmp_path / "runs/gpt-small"
    assert {path.name for path in folder.iterdir()} >= RUN_FILES | {"tensorboard"}
    check_run_folder(folder, ended.json)
    assert "predicted against measured" in ended.err
    assert " candidates" in ended.err


def check_run_folder(folder: Path, said: dict[str, Any]) -> None:
    """Every file can be read as the value it is, and agrees with what was printed."""
    settings = Settings.load(folder / "settings.toml")
    assert (settings.steps, settings.nproc) == (6, 2) or settings.nproc is None
    plan, trace = Plan.load(folder / "plan.json"), Trace.load(folder / "trace.json")
    estimate = Estimate.load(folder / "estimate.json")
    assert (plan.world, plan.global_batch) == (2, 16)
    assert trace.plan == plan.hash
    assert (trace.num_steps, trace.num_ranks, len(trace.steps)) == (6, 2, 6)
    assert [step for step, _ in losses(folder)] == list(range(6))
    assert said["loss"] == losses(folder)[-1][1] == trace.steps[-1].loss
    assert said["measured_peak_bytes"] == trace.peak_bytes
    assert said["step_seconds"] == trace.step_seconds
    assert said["predicted_step_seconds"] == estimate.step_seconds
    assert said["predicted_peak_bytes"] == estimate.peak_bytes
    assert trace.collectives == estimate.collectives
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006"]


def test_train_under_torchrun(cli: Cli, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshwright")
    ended = cli("train", ROOT / "examples/gpt-small.toml", "--steps", 6, "--json", launcher=launcher)
    assert ended.code == 0, ended.err
    assert ended.json.keys() >= TRAIN_KEYS
    check_run_folder(tmp_path / "runs/gpt-small", ended.json)


def test_a_finished_run(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    """Every effective setting is written down; to resume it changes nothing, and above all loses nothing."""
    file = settings(optimizer={"kind": "Adam", "options": {"betas": [0.8, 0.9]}}, plan={"global_batch": 8, "zero": 2})
    first = cli("train", file, "--seed", 7, "--steps", 3)
    assert first.code == 0, first.err
    written = tomllib.loads((tmp_path / "run/settings.toml").read_text())
    assert (written["seed"], written["steps"], written["plan"]["zero"]) == (7, 3, 2)
    assert written["optimizer"]["options"] == {"betas": [0.8, 0.9]}
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1, 2]
    trace, metrics = (tmp_path / "run" / name for name in ("trace.json", "metrics.jsonl"))
    before = (Trace.load(trace), metrics.read_text())
    resumed = cli("train", tmp_path / "run/settings.toml", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert (Trace.load(trace), metrics.read_text()) == before
    assert resumed.json["loss"] == losses(tmp_path / "run")[-1][1]


# Interruption and death.


SLOW = {"model": f"{ASSETS}/models.py:slow", "steps": 14}


def test_ctrl_c_leaves_a_checkpoint_and_resume_goes_on(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    """SIGINT to the parent alone. The resumed run gives the losses of one that was never interrupted."""
    file = settings(**SLOW)
    whole = cli("train", file, "--json", "--out", "whole")
    assert whole.code == 0, whole.err
    run = start("train", file, "--json")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, run)
    run.process.send_signal(signal.SIGINT)
    ended = run.end()
    assert ended.code == 130, ended.err
    assert (ended.json["stopped"], ended.json["run_folder"]) == ("interrupted", str(tmp_path / "run"))
    done = ended.json["num_steps"]
    assert 3 <= done < 14
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{done:08d}"]
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(done))
    resumed = cli("train", file, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["num_steps"] == 14
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_ctrl_c_in_a_terminal(start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path) -> None:
    """A terminal sends SIGINT to the parent and to every rank at once."""
    run = start("train", settings(**SLOW, plan={"global_batch": 8, "zero": 3}), "--json")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, run)
    for pid in (run.process.pid, *run.ranks().values()):
        os.kill(pid, signal.SIGINT)
    ended = run.end()
    assert ended.code == 130, ended.err
    assert ended.json["stopped"] == "interrupted"
    assert Path(ended.json["checkpoint"]).joinpath("progress.json").exists()
    assert "Traceback" not in ended.err


def test_a_rank_that_is_killed_is_named(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    run = start("train", settings(**SLOW, checkpoint={"every": 1}))
    wait_for(lambda: (tmp_path / "run/checkpoints/step-00000002").exists(), run)
    ranks = run.ranks()
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    ended = run.end()
    assert ended.code == 1
    assert f"error: rank 1 of 2 was killed from outside (SIGKILL, process {ranks[1]})" in ended.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()), "a rank outlived the run"
    assert "Traceback" not in ended.err.partition("error: ")[2]


def test_a_rank_that_raises_is_named(cli: Cli, settings: Callable[..., Path]) -> None:
    """The rank that failed first and its own error, not the others' broken connections."""
    ended = cli("train", settings(model=f"{ASSETS}/models.py:fails_late"))
    assert ended.code == 1
    said = ended.err.partition("error: ")[2]
    assert said.startswith("rank 1 of 2 failed: ArithmeticError: the gears slipped")
    assert "models.py" in said, "the user's own line is missing"


def test_a_loss_that_is_not_finite_ends_the_run(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    rate = {"peak": 1e30, "schedule": "constant", "warmup_steps": 0}
    ended = cli("train", settings(learning_rate=rate, steps=20, optimizer={"kind": "SGD"}))
    assert ended.code == 1
    assert re.search(
        r"error: rank \d of 2 failed: the loss is (nan|inf) at step \d+: lower learning_rate.peak", ended.err
    )


# Ranks that hang, and values that are not finite.


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshwright")
HANGS = rf"""rank 1 of 2 hangs: others have waited for 3 s
  rank 1 stands at {ASSETS}/models.py:\d+ in forward: time.sleep\(3600\)
  rank 0 waits in (all_reduce|all_gather) over dp, [\d.]+ (B|KiB), at .*\.py:\d+ in \w+: .*
  give more time with --timeout"""


@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_that_hangs_is_named(cli: Cli, settings: Callable[..., Path], zero: int) -> None:
    """Which rank, on which line, and the collective the other waits in."""
    file = settings(model=f"{ASSETS}/models.py:hangs", plan={"global_batch": 8, "zero": zero})
    ended = cli("train", file, "--timeout", 3)
    assert ended.code == 1
    assert re.search(f"error: {HANGS}", ended.err), ended.err
    assert "Traceback" not in ended.err


def test_a_hang_in_native_code(cli: Cli, settings: Callable[..., Path]) -> None:
    ended = cli("train", settings(model=f"{ASSETS}/models.py:hangs_in_native"), "--timeout", 3)
    assert ended.code == 1
    assert "error: rank 1 of 2 hangs: others have waited for 3 s" in ended.err
    assert "rank 1 does not answer: it is stopped, or in native code that holds Python" in ended.err
    assert "rank 0 waits in all_reduce over dp" in ended.err


def test_a_hang_under_torchrun_and_in_parity(cli: Cli) -> None:
    model = f"{ASSETS}/models.py:hangs"
    ended = cli("parity", model, "--nproc", 2, "--timeout", 3)
    assert ended.code == 1
    assert re.search(f"error: {HANGS}", ended.err), ended.err
    ended = cli("parity", model, "--timeout", 3, launcher=TORCHRUN)
    assert ended.code == 1
    assert re.search(f"error: {HANGS}", ended.err), ended.err
    assert ended.err.count("rank 1 of 2 hangs") == 1


def test_ranks_with_different_plans_under_torchrun(cli: Cli, tmp_path: Path) -> None:
    """One message for all ranks, that names the odd one."""
    for number in range(4):
        plan_of(Case("gpt", zero=2 if number == 2 else 0), 4).save(tmp_path / f"plan{number}.json")
    own = tmp_path / "own.sh"
    own.write_text(f'exec "{sys.executable}" -m meshwright parity "{MODELS["gpt"]}" --plan plan$RANK.json\n')
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "--no-python", "sh")
    ended = cli(own, launcher=launcher)
    assert ended.code == 1
    assert ended.err.count("error: ranks hold different plans: rank 2 differs from the others") == 1, ended.err
    assert ended.err.count("error: ") == 1


def test_a_plan_for_more_ranks_under_torchrun(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    file = settings(model=MODELS["gpt"])
    text = file.read_text().replace("nproc = 2\n", "").partition("[plan]")[0]
    file.write_text(text)
    plan = plan_of(Case("gpt", precision="fp32"), 8).save(tmp_path / "plan.json")
    ended = cli("train", file, "--plan", plan, launcher=TORCHRUN)
    assert ended.code == 1
    assert ended.err.count("error: ") == 1, ended.err
    assert re.search(r"8 ranks.*2", ended.err)


def test_the_block_that_made_a_nan_is_named(cli: Cli, settings: Callable[..., Path]) -> None:
    file = settings(model=f"{ASSETS}/models.py:broken")
    ended = cli("train", file)
    assert ended.code == 1
    assert (
        "the loss is nan at step 1: lower learning_rate.peak or check the data, and rerun with --find-nan" in ended.err
    )
    ended = cli("train", file, "--find-nan", "--zero", 2)
    assert ended.code == 1
    assert "at step 1: first in forward of block 'layers.1.down.0' (Breaks), at step 1 on rank 1" in ended.err


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
        ({"plan": {"global_batch": 8, "microbatch": 3}}, "do not divide into microbatches of 3: use one of 1, 2, 4"),
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
        (["probe", "--nproc", "0"], "--nproc 0: at least one rank is needed"),
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


def test_parity_fails_for_a_model_that_draws_at_random(cli: Cli) -> None:
    ended = cli("parity", f"{ASSETS}/models.py:noisy", "--nproc", 2, "--steps", 1, "--json")
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
    assert all(other.keys() == {"plan", "step_seconds", "reason"} for other in said["runners_up"])
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


def test_probe_is_cached(cli: Cli, environment: dict[str, str], tmp_path: Path) -> None:
    """Measured once, then read: the second call says nothing about measuring and gives the same cluster."""
    first = cli("probe", "--nproc", 2, "--json", "-o", "cluster.toml")
    assert first.code == 0, first.err
    again = cli("probe", "--nproc", 2, "--json")
    assert "measuring this machine" not in again.err
    assert again.json == first.json
    assert list(Path(environment["XDG_CACHE_HOME"], "meshwright").glob("cluster-*.json"))
    cluster = Cluster.load(tmp_path / "cluster.toml")
    assert (cluster.origin, cluster.num_devices, cluster.device.kind) == ("probe", 2, "cpu")


def test_version_and_help(here: Cli) -> None:
    import meshwright

    assert here("--version").out.strip() == meshwright.__version__
    said = here("train", "--help").out
    for flag in ("--nproc", "--zero", "--global-batch", "--resume", "--json", "--plan"):
        assert flag in said
