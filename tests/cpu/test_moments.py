"""Adam's moments in 16 bits on the host: what exactly is kept, that it keeps moving, and that training is hardly disturbed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, source_of
from pool import RankError, RankPool, this_rank
from test_host_optimizer import adamw, batches, build, plan_with, sgd
from torch import Tensor

from meshwright.runtime.apply import apply
from meshwright.runtime.offload.kernel import find_kernel
from meshwright.runtime.offload.rules import AdamRule, State, Task
from meshwright.runtime.program import Program
from meshwright.training.checkpoint import Progress, restore, save

Pools = Callable[[int], RankPool]
CASE = Case("gpt", precision="bf16", samples=4)
SIZE = 40_000
"""Several chunks of the kernel's, and a rest."""


@pytest.fixture
def rule() -> Iterator[AdamRule]:
    kernel = find_kernel()
    if kernel is None:
        pytest.skip("no C compiler")
    found = AdamRule(kernel, decoupled=True, num_threads=2)
    yield found
    found.close()


def state_in(dtype: torch.dtype, size: int = SIZE) -> State:
    return {"step": 0, "exp_avg": torch.zeros(size, dtype=dtype), "exp_avg_sq": torch.zeros(size, dtype=dtype)}


def group(**changes: Any) -> State:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    return {**torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.999)).param_groups[0], **changes}


def noise(step: int, size: int) -> np.ndarray[Any, Any]:
    """As adam.c says: a hash of the place and of the step."""

    def mixed(place: Any, seed: Any) -> Any:
        bits = (place * np.uint32(0x9E3779B1)) ^ seed
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return bits ^ (bits >> np.uint32(16))

    seed = mixed(np.array([step], dtype=np.uint32), np.uint32(0x5BD1E995))
    return mixed(np.arange(size, dtype=np.uint32), seed) & np.uint32(0xFFFF)  # type: ignore[no-any-return]


def dithered(value: Tensor, step: int) -> Tensor:
    bits = (value.numpy().view(np.uint32) + noise(step, value.numel())) >> np.uint32(16)
    return torch.from_numpy((bits << np.uint32(16)).view(np.float32)).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_wide_updated_wide_kept_narrow(rule: AdamRule, dtype: torch.dtype) -> None:
    """Every step is that of fp32 moments that were what is kept; the first is then rounded to the nearest, the second at random."""
    torch.manual_seed(0)
    weight, kept = torch.randn(SIZE), state_in(torch.bfloat16)
    for step in range(1, 6):
        gradient = torch.randn(SIZE).to(dtype)
        wide: State = {"step": step - 1, **{key: kept[key].float() for key in ("exp_avg", "exp_avg_sq")}}
        expected = weight.clone()
        rule.update([Task(expected, wide, gradient, None, group(), 0.7)])
        rule.update([Task(weight, kept, gradient, None, group(), 0.7)])
        assert torch.equal(weight, expected)
        assert torch.equal(kept["exp_avg"], wide["exp_avg"].bfloat16())
        assert torch.equal(kept["exp_avg_sq"], dithered(wide["exp_avg_sq"], step))


def test_the_second_moment_keeps_moving(rule: AdamRule) -> None:
    """Gradients become ten times smaller: rounded to the nearest, the second moment would stay what it was for ever."""
    kept, weight = state_in(torch.bfloat16, 4096), torch.zeros(4096)
    nearest = torch.zeros(())
    for step in range(4000):
        size = 1.0 if step < 1000 else 0.1
        rule.update([Task(weight, kept, torch.full((4096,), size), None, group(), 1.0)])
        nearest = (nearest.float() * 0.999 + 0.001 * size**2).bfloat16()
    exact = (1 - 0.999**1000) * 0.999**3000 + 0.01 * (1 - 0.999**3000)
    assert float(kept["exp_avg_sq"].float().mean()) == pytest.approx(exact, rel=0.02)
    assert float(nearest) > 4 * exact


def losses_of(moments: str, num_steps: int) -> tuple[list[float], int]:
    program = apply(
        build(CASE), plan_with(CASE, moments=moments), optimizer=adamw, objective=source_of("gpt").objective,
        device=this_rank().device,
    )  # fmt: skip
    assert program.host is not None
    found = [program.step(batch).loss for batch in batches(CASE, 1, 1) * num_steps]
    size = program.host.state.host_bytes
    program.host.close()
    return found, size


def test_training_is_hardly_disturbed(pool: Pools) -> None:
    """The loss falls to a fraction; on its way it is never off by more than a fiftieth."""
    wide, wide_bytes = pool(1).run(losses_of, "fp32", 40)[0]
    narrow, narrow_bytes = pool(1).run(losses_of, "bf16", 40)[0]
    assert wide[-1] < 0.3 * wide[0]
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.02, abs=0.02)
    assert narrow_bytes < wide_bytes


def started(moments: str) -> Program:
    return apply(
        build(CASE), plan_with(CASE, moments=moments), optimizer=adamw, objective=source_of("gpt").objective,
        device=this_rank().device,
    )  # fmt: skip


def saved_and_gone_on(folder: Path) -> list[float]:
    program = started("bf16")
    every = batches(CASE, 1, 6)
    for batch in every[:3]:
        program.step(batch)
    progress = Progress(step=3, cursor=12, plan=program.plan.hash, graph=program.plan.graph, num_ranks=1)
    save(program, progress, folder, this_rank(), keep=1)
    found = [program.step(batch).loss for batch in every[3:]]
    assert program.host is not None
    program.host.close()
    return found


def resumed(folder: Path, moments: str) -> list[float]:
    program = started(moments)
    restore(program, program.plan.graph, folder, this_rank())
    found = [program.step(copy.deepcopy(batch)).loss for batch in batches(CASE, 1, 6)[3:]]
    assert program.host is not None
    program.host.close()
    return found


def test_resumed(pool: Pools, tmp_path: Path) -> None:
    """To the last bit with the same moments; with others, within what they differ by."""
    expected = pool(1).run(saved_and_gone_on, tmp_path)[0]
    assert pool(1).run(resumed, tmp_path, "bf16")[0] == expected
    assert pool(1).run(resumed, tmp_path, "fp32")[0] == pytest.approx(expected, rel=1e-2)


def refused(optimizer: Any, **offload: Any) -> None:
    apply(build(CASE), plan_with(CASE, moments="bf16", **offload), optimizer=optimizer, device=this_rank().device)


def test_what_cannot_keep_them_is_refused(pool: Pools) -> None:
    with pytest.raises(RankError, match="only Adam and AdamW with plain options are updated so, not SGD"):
        pool(1).run(refused, sgd)
