"""Streamed blocks whose masters and optimizer state are on disk: the same training, and a crash leaves a whole step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from cases import Case, plan_of, source_of
from pool import RankPool, this_rank
from test_streaming import batch_of, program_of

from meshwright.core.errors import PlanError
from meshwright.core.plan import Offload, Plan
from meshwright.measure.parity import ParityResult, compare
from meshwright.rules.limits import check_runs
from meshwright.runtime.offload import disk_store
from meshwright.runtime.offload.disk_state import DiskState, state_keys
from meshwright.runtime.offload.disk_store import DiskStore

Pools = Callable[[int], RankPool]


def on_disk(case: Case, folder: Path) -> Plan:
    offload = Offload(what="parameters", where="disk", folder=str(folder), stash="host")
    return msgspec.structs.replace(plan_of(case), offload=offload)


def compare_on_rank(case: Case, folder: Path) -> ParityResult:
    with mock.patch.object(disk_store, "CHUNK_BYTES", 4096):
        return compare(source_of(case.model).small(), on_disk(case, folder), 3, this_rank())


@pytest.mark.parametrize("model", ["gpt", "llama", "frozen"])
def test_agrees_with_one_process(pool: Pools, model: str, tmp_path: Path) -> None:
    for result in pool(1).run(compare_on_rank, Case(model, 0, "full", 2), tmp_path):
        assert result.ok, result.first_difference


def test_over_dp_each_rank_has_its_own_folder(pool: Pools, tmp_path: Path) -> None:
    for result in pool(2).run(compare_on_rank, Case("gpt", 3, "full", 1), tmp_path):
        assert result.ok, result.first_difference
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "rank-1"}


def saved_on_rank(folder: Path) -> list[bool]:
    """After every step the folder, copied as a crash would leave it, holds the masters of that step."""
    program = program_of("gpt", on_disk(Case("gpt", 0, "full", 1, precision="bf16"), folder))
    found = []
    for step in range(3):
        program.step(batch_of("gpt", 4))
        copy = folder / f"copy-{step}"
        shutil.copytree(folder / "rank-0", copy)
        store = DiskStore.reopen(copy)
        for name, home in program.streams.streaming.homes.items():
            flat = torch.empty(3 * home.local_elements)
            store.read(name, flat).wait()
            views = home.local_views(flat[: home.local_elements])
            found += [torch.equal(one, view) for one, view in zip(home.masters, views, strict=True)]
            moments = home.local_views(flat[home.local_elements : 2 * home.local_elements])
            states = [program.optimizer.state[master]["exp_avg"] for master in home.masters]
            found += [torch.equal(one, view) and bool(view.any()) for one, view in zip(states, moments, strict=True)]
        store.close()
    program.close()
    return found


def test_each_step_is_on_disk_when_it_is_done(pool: Pools, tmp_path: Path) -> None:
    found = pool(1).run(saved_on_rank, tmp_path)[0]
    assert len(found) == 3 * 2 * 2 * 16
    assert all(found)


def host_bytes_on_rank(folder: Path | None) -> int:
    case = Case("gpt:layers=12,hidden=32,heads=4,seq=16,vocab=61", 0, "full", 1, precision="bf16")
    plan = on_disk(case, folder) if folder is not None else plan_of(case)
    if folder is None:
        plan = msgspec.structs.replace(plan, offload=Offload(what="parameters", stash="host"))
    program = program_of(case.model, plan)
    program.step(batch_of(case.model, 4))
    place = program.streams.updates.place
    staged = place.staged_bytes if isinstance(place, DiskState) else 0
    moments = sum(
        item.numel() * 4
        for home in program.streams.streaming.homes.values()
        for master in home.masters
        for item in program.optimizer.state[master].values()
        if item.shape == master.shape and folder is None
    )
    held = program.holdings().host
    program.close()
    return held + staged + moments


def test_the_host_holds_working_copies_and_a_few_blocks(pool: Pools, tmp_path: Path) -> None:
    assert pool(1).run(host_bytes_on_rank, tmp_path)[0] < 0.5 * pool(1).run(host_bytes_on_rank, None)[0]


def full_disk_on_rank(folder: Path) -> tuple[str, int]:
    program = program_of("gpt", on_disk(Case("gpt", 0, "full", 1, precision="fp32"), folder))
    program.step(batch_of("gpt", 4))
    full = OSError(28, "No space left on device")
    error = ""
    with mock.patch.object(disk_store.os, "pwritev", side_effect=full):
        try:
            program.step(batch_of("gpt", 4))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    program.close()
    store = DiskStore.reopen(folder / "rank-0")
    note = store.note()
    store.close()
    return error, note


def test_a_disk_that_fills_up_ends_the_step_and_keeps_the_last(pool: Pools, tmp_path: Path) -> None:
    error, commits = pool(1).run(full_disk_on_rank, tmp_path)[0]
    assert error.startswith("DiskError: ")
    assert "No space left on device" in error
    assert commits == 2, "the beginning and the first step"


def missing_on_rank(folder: Path) -> str:
    try:
        program_of("gpt", on_disk(Case("gpt", 0, "full", 1, precision="fp32"), folder))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_missing_folder_is_named(pool: Pools, tmp_path: Path) -> None:
    assert "missing: no such folder; make it" in pool(1).run(missing_on_rank, tmp_path / "missing")[0]


def test_a_disk_needs_a_folder() -> None:
    plan = plan_of(Case("gpt", 0, "full"), 1)
    unnamed = msgspec.structs.replace(plan, offload=Offload(what="parameters", where="disk"))
    with pytest.raises(PlanError, match=r"offload to disk without a folder: name one in offload\.folder"):
        check_runs(unnamed)


@pytest.mark.parametrize(
    ("made", "keys"),
    [
        (partial(torch.optim.AdamW, lr=1e-3), ("exp_avg", "exp_avg_sq")),
        (partial(torch.optim.SGD, lr=1e-3), ()),
        (partial(torch.optim.SGD, lr=1e-3, momentum=0.9), ("momentum_buffer",)),
    ],
)
def test_what_an_optimizer_keeps_is_found_by_trying(made: Any, keys: tuple[str, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = made([parameter])
    assert state_keys(optimizer) == keys
    assert not optimizer.state
    assert torch.equal(parameter, torch.ones(4, 4))
