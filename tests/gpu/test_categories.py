"""Memory by category on a GPU: its sum is the allocator's own figure, over a step and at its peak."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from meshwright.capturing.capture import capture_source
from meshwright.core.request import PlanRequest
from meshwright.core.run.trace import Trace
from meshwright.measure.record import StepRecorder
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.held import held_bytes
from meshwright.runtime.ranks import Rank, joined
from meshwright.runtime.watch import SAMPLED_STEP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODEL = "gpt:layers=8,hidden=1024,heads=16,seq=1024,vocab=8192"
SAMPLES = 16
WITHIN = 0.01
LIBRARIES_BYTES = 96 * 2**20
"""At most what cuBLAS and others keep of the allocator's memory from one step to the next: it belongs to no category."""


@dataclass(frozen=True)
class Recorded:
    trace: Trace
    before_bytes: int
    """In use at the allocator when the step began."""
    held_bytes: int
    """Of them, in a category."""
    peak_bytes: int
    """Of the allocator, in this step."""


CASES: dict[str, dict[str, Any]] = {
    "plain": {"zero": 0},
    "microbatches": {"zero": 0, "microbatch": 4},
    "recompute": {"zero": 0, "recompute": "full"},
    "bf16": {"zero": 0, "precision": "bf16"},
    "zero 1": {"zero": 1, "microbatch": 4},
    "zero 2, recompute, microbatches": {"zero": 2, "recompute": "full", "microbatch": 4},
    "zero 3": {"zero": 3},
    "zero 3, bf16, recompute": {"zero": 3, "precision": "bf16", "recompute": "full"},
}


@pytest.mark.parametrize("case", CASES)
def test_categories_add_up_to_what_the_allocator_says(case: str) -> None:
    with joined("cuda") as rank:
        seen = recorded(rank, CASES[case])
    assert seen.trace.memory_bytes is not None
    libraries = seen.before_bytes - seen.held_bytes
    assert 0 <= libraries <= LIBRARIES_BYTES
    assert seen.trace.memory_bytes.total == pytest.approx(seen.peak_bytes - libraries, rel=WITHIN)
    points = seen.trace.memory_over_time
    assert max(point.memory_bytes.total for point in points) == seen.trace.memory_bytes.total
    assert points[0].memory_bytes.total == pytest.approx(seen.before_bytes - libraries, rel=WITHIN)
    assert points[-1].memory_bytes.total == pytest.approx(seen.before_bytes - libraries, rel=WITHIN)


def test_libraries_are_less_than_that_of_a_step_that_keeps_everything() -> None:
    """Nothing is taken off here."""
    with joined("cuda") as rank:
        seen = recorded(rank, CASES["plain"])
    assert seen.trace.peak_bytes == pytest.approx(seen.peak_bytes, rel=WITHIN)


def recorded(rank: Rank, fixed: dict[str, Any]) -> Recorded:
    """The sampled step of a run on one rank."""
    gc.collect()
    left_over = torch.cuda.memory_allocated()  # by earlier tests
    source = resolve(MODEL)
    assert source.example is not None
    precision = fixed.get("precision", "fp32")
    plan = plain_plan(PlanRequest(global_batch=SAMPLES, **fixed), capture_source(source, precision), 1, "")
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    program = apply(source.build(), plan, optimizer=optimizer, recorder=StepRecorder(), device=rank.device)
    batch = source.example(SAMPLES)
    for _ in range(SAMPLED_STEP):
        program.step(batch)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - left_over
    held = held_bytes(program, batch).total
    program.step(batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - left_over
    return Recorded(program.trace(), before, held, peak)
