"""A compiled plan gives the loss and gradients of one eager process, and one graph serves all blocks of a kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product

import pytest
import torch
from cases import RECOMPUTES, Case, plan_of, source_of
from pool import RankPool, this_rank
from test_parity import check, compare_on_rank

from meshwright.measure.record import StepRecorder
from meshwright.models.objective import DEFAULT, default_loss
from meshwright.runtime.apply import apply
from meshwright.runtime.compile import compile_loss

Pools = Callable[[int], RankPool]

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or " " in torch.__file__,
    reason="torch.compile on the CPU needs a C++ compiler, and torch in a folder without a space in its name",
)
DEEP = "gpt:layers=9,hidden=16,heads=2,seq=8,vocab=31"
"""More blocks than torch makes graphs for one piece of code."""


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [Case("gpt", zero, recompute, compile=True) for zero, recompute in product((0, 3), RECOMPUTES)],
    ids=str,
)
def test_compiled_ranks_agree_with_one_eager_process(pool: Pools, case: Case) -> None:
    check(pool(2).run(compare_on_rank, case, 2))


def graphs_of_a_run(recompute: str) -> int:
    """How many graphs torch makes of a deep model: its blocks, and its loss."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    case = Case(DEEP, recompute=recompute, compile=True)
    with pytest.MonkeyPatch.context() as patch:
        compile_with = torch.compile
        patch.setattr(torch, "compile", lambda function, **options: compile_with(function, backend=counter, **options))
        program = apply(source_of(DEEP).build(), plan_of(case), optimizer=torch.optim.AdamW, device=this_rank().device)
        example = source_of(DEEP).example
        assert example is not None
        for _ in range(3):
            program.step(example(case.samples))
    return int(counter.frame_count)


@needs_compiler
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_one_graph_serves_all_blocks(pool: Pools, recompute: str) -> None:
    assert pool(1).run(graphs_of_a_run, recompute) == [2]


def peak_of_a_run(case: Case) -> int:
    """As the recorder sees it in the third step."""
    program = apply(
        source_of(case.model).build(),
        plan_of(case),
        optimizer=torch.optim.AdamW,
        recorder=StepRecorder(),
        device=this_rank().device,
    )
    example = source_of(case.model).example
    assert example is not None
    for _ in range(3):
        program.step(example(case.samples))
    assert program.watch.sample is not None
    return program.watch.sample.memory_bytes.total


@needs_compiler
def test_the_recorder_sees_what_compiling_saves(pool: Pools) -> None:
    """A recorder that made torch fall back to eager would see no difference."""
    eager, compiled = (
        pool(1).run(peak_of_a_run, Case("gpt:layers=2,hidden=32,heads=4,seq=64,vocab=512", compile=choice))[0]
        for choice in (False, True)
    )
    assert compiled < 0.9 * eager


def test_a_plan_that_does_not_compile_keeps_the_loss() -> None:
    assert compile_loss(DEFAULT, plan_of(Case("gpt"), 1)) is DEFAULT
    assert compile_loss(DEFAULT, plan_of(Case("gpt", compile=True), 1)).loss is not default_loss
