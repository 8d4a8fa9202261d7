"""Optimizer state in a file beside parameters on the device: the same numbers, and nothing left that could be taken for state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cases import Case, source_of
from pool import RankError, RankPool, this_rank
from test_host_optimizer import adamw, batches, build, differences_on_rank, plan_with, sgd

from meshwright.runtime.apply import apply
from meshwright.runtime.offload.host import FileMemory

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("case", "offload"),
    [
        (Case("gpt", precision="fp32"), {}),
        (Case("tied", precision="fp32", num_microbatches=2), {"share": 0.6}),
        (Case("gpt", 2, precision="fp32"), {}),
    ],
)
def test_to_the_last_bit(pool: Pools, tmp_path: Path, case: Case, offload: dict[str, Any]) -> None:
    num_ranks = 2 if case.zero else 1
    where = {**offload, "where": "disk", "folder": str(tmp_path)}
    for loss, parameter in pool(num_ranks).run(differences_on_rank, case, where):
        assert (loss, parameter) == (0, 0)
    assert not list(tmp_path.iterdir()), "the file has no name"


def maps_on_rank(folder: Path) -> tuple[int, int]:
    """Bytes of the state, and bytes that are mapped from files of the folder while a program lives."""
    case = Case("gpt", precision="bf16")
    plan = plan_with(case, where="disk", folder=str(folder), moments="bf16")
    program = apply(build(case), plan, optimizer=adamw, objective=source_of("gpt").objective, device=this_rank().device)
    assert program.host is not None
    for batch in batches(case, 1, 2):
        program.step(batch)
    program.host.settle()
    _, plain = program.host.state.memory
    assert isinstance(plain, FileMemory)
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if str(folder) in line and line.endswith("(deleted)")]
    program.host.close()
    return plain.num_bytes, sum(int(last, 16) - int(first, 16) for first, last in spans)


def test_the_state_is_in_the_file(pool: Pools, tmp_path: Path) -> None:
    (found,) = pool(1).run(maps_on_rank, tmp_path)
    state, mapped = found
    assert 0 < state <= mapped


def refused(folder: Path, optimizer: Any) -> None:
    plan = plan_with(Case("gpt", precision="fp32"), where="disk", folder=str(folder))
    apply(build(Case("gpt", precision="fp32")), plan, optimizer=optimizer, device=this_rank().device)


def refused_for_room(folder: Path) -> None:
    usage = shutil.disk_usage(folder)._replace(free=1000)
    with mock.patch.object(shutil, "disk_usage", return_value=usage):
        refused(folder, adamw)


def test_what_cannot_be_is_refused(pool: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the plan keeps optimizer state on disk: only Adam and AdamW"):
        pool(1).run(refused, tmp_path, sgd)
    with pytest.raises(RankError, match="no such folder; make it"):
        pool(1).run(refused, tmp_path / "none", adamw)
    with pytest.raises(
        RankError, match=r"are needed on disk, offload of the optimizer state of [\d,]+ parameters, but 1000 B"
    ):
        pool(1).run(refused_for_room, tmp_path)
