"""The check before a run: a small copy of a user's model against one process, without being asked for."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cases import ASSETS
from command import Cli
from pool import RankError, RankPool
from torch import nn

import meshwright as mw
from meshwright.capturing.capture import capture_source
from meshwright.core.plan import Mesh, Offload, Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.checking import check as checking
from meshwright.measure.checking.check import check
from meshwright.measure.checking.kept import Kept, code_of
from meshwright.measure.checking.live import skeleton
from meshwright.measure.checking.reduced import needs_check, reduced
from meshwright.models.shortened import BLOCKS, shortened
from meshwright.models.source import resolve
from meshwright.models.userfile import import_file
from meshwright.rules.plain_plan import plain_plan

Pools = Callable[[int], RankPool]
FILE = f"{ASSETS}/own_backward.py"
strangers = import_file(Path(FILE))


def plan_of(**mesh: int) -> Plan:
    module, batch = strangers.after_down()
    made = plain_plan(PlanRequest(), mw.capture(module, batch, loss=cross_entropy), 1, "by hand")
    return msgspec.structs.replace(
        made, mesh=Mesh(**mesh), global_batch=mesh.get("dp", 1), num_microbatches=1, microbatch=1
    )


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(
    ("mesh", "zero", "ranks"),
    [
        ({"tp": 8}, 0, [2]),
        ({"tp": 4, "dp": 4}, 0, [2]),
        ({"tp": 4, "dp": 4}, 1, [4]),
        ({"tp": 4, "cp": 2}, 0, [4]),
        ({"dp": 8, "ep": 4}, 0, [2]),
    ],
)
def test_every_axis_in_use_is_reduced_to_two(mesh: dict[str, int], zero: int, ranks: list[int]) -> None:
    plan = msgspec.structs.replace(plan_of(**mesh), zero=zero)
    assert [num_ranks for _, num_ranks in reduced(plan)] == ranks
    for request, _ in reduced(plan):
        assert all(getattr(request, axis) in (None, 2) for axis in ("tp", "cp", "pp", "ep"))


def test_pairs_of_three_axes_take_turns() -> None:
    plan = msgspec.structs.replace(plan_of(tp=4, cp=2, dp=2), zero=3)
    assert len(reduced(plan)) == 3
    assert all(num_ranks == 4 for _, num_ranks in reduced(plan))
    assert sum(request.zero == 3 for request, _ in reduced(plan)) == 2


def test_replicas_run_the_model_as_it_is() -> None:
    assert not needs_check(plan_of(dp=8))
    assert not needs_check(msgspec.structs.replace(plan_of(dp=8), zero=3))
    offloaded = msgspec.structs.replace(plan_of(dp=2), zero=3, offload=Offload(what="optimizer"))
    assert needs_check(offloaded)


def test_a_change_of_the_file_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "model.py"
    file.write_text("a = 1")
    Kept(code_of(f"{file}:make")).add("graph", "plan")
    assert Kept(code_of(f"{file}:make")).has("graph", "plan")
    file.write_text("a = 2")
    assert not Kept(code_of(f"{file}:make")).has("graph", "plan")


def test_a_copy_takes_no_memory_and_few_blocks() -> None:
    module = nn.Sequential(nn.ModuleList(nn.Linear(4, 4) for _ in range(9)), nn.Linear(4, 4))
    module.register_buffer("table", torch.arange(3.0))
    small = skeleton(module)
    assert len(small[0]) == BLOCKS
    assert all(parameter.is_meta for parameter in small.parameters())
    assert torch.equal(small.table, module.table)
    assert len(module[0]) == 9
    assert not any(parameter.is_meta for parameter in module.parameters())


# ---------------------------------------------------------------- train


@pytest.fixture
def asked(settings: Callable[..., Path]) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        data = {"source": f"{FILE}:samples", "validation_every": 0}
        plan = {"tp": 2, "global_batch": 4, "microbatch": 2}
        return settings(model=f"{FILE}:{name}", steps=2, plan=plan, data=data)

    return write


def test_train_refuses_what_differs_and_writes_nothing(cli: Cli, asked: Callable[[str], Path], tmp_path: Path) -> None:
    ended = cli("train", asked("reads_rank"), "--json")
    assert ended.code == 2, ended.err
    assert "one process" in ended.err
    assert "gradient of" in ended.err or "loss" in ended.err
    assert not (tmp_path / "run").exists()
    unchecked = cli("train", asked("reads_rank"), "--no-check", "--json")
    assert unchecked.code == 0, unchecked.err
    assert "not checked" in unchecked.err
    assert tomllib.loads((tmp_path / "run/settings.toml").read_text())["check"] is False


def test_train_checks_once(cli: Cli, asked: Callable[[str], Path]) -> None:
    first, second = cli("train", asked("after_down"), "--json"), cli("train", asked("after_down"), "--json")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "checking a small copy" in first.err
    assert "checking a small copy" not in second.err


# ---------------------------------------------------------------- modules in memory


@contextmanager
def own_cache(folder: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        yield


def train_on_rank(name: str, how: str, folder: str) -> list[float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module, batch = getattr(strangers, name)()[0], strangers.text_batch()
    graph = mw.capture(module, batch, loss=cross_entropy)
    plan = mw.plain_plan(PlanRequest(tp=2, global_batch=4, microbatch=4), graph, 2, "tests")
    with own_cache(folder):
        if how == "apply":
            program = mw.apply(module, plan, optimizer=torch.optim.SGD, loss=cross_entropy)
            return [program.step(batch).loss]
        module, optimizer = mw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), plan)
        loss = cross_entropy(module(batch["ids"]), batch)
        loss.backward()
        optimizer.step()
        return [loss.item()]


@pytest.mark.parametrize("how", ["apply", "wrap"])
def test_a_module_in_memory_is_checked_at_its_first_batch(pool: Pools, how: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"PlanError: under tp 2(?s:.)*one process"):
        pool(2).run(train_on_rank, "reads_rank", how, str(tmp_path))
    alike = pool(2).run(train_on_rank, "after_down", how, str(tmp_path))
    assert alike[0] == pytest.approx(alike[1])


# ---------------------------------------------------------------- models of many blocks


@pytest.mark.usefixtures("_ranks_are_forked")
def test_a_model_of_many_blocks_is_compared_with_few_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = f"{ASSETS}/strangers.py:deep"
    whole, few = (capture_source(source, "fp64") for source in (resolve(model), shortened(resolve(model))))
    assert len(few.repeated_blocks) == BLOCKS
    assert 10 * few.num_parameters < whole.num_parameters
    monkeypatch.setattr(checking, "MOST_PARAMETERS", whole.num_parameters // 2)
    plan = plain_plan(PlanRequest(tp=2, global_batch=4, microbatch=2), whole, 2, "by hand")
    assert check(resolve(model), plan, {"model": model}, Kept("code"), lambda _: None).status == "same"


def test_a_model_that_counts_its_blocks_itself_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(f"{ASSETS}/strangers.py:deep_counted")
    monkeypatch.setattr(checking, "MOST_PARAMETERS", 500_000)
    plan = plain_plan(PlanRequest(tp=2, global_batch=4, microbatch=2), capture_source(source, "fp64"), 2, "by hand")
    found = check(source, plan, {}, Kept("code"), lambda _: None)
    assert found.status == "not checked"
    assert f"with {BLOCKS} blocks alone it does not run" in found.words
