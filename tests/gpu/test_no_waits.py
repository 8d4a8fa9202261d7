"""A step on a GPU that never makes the host wait: it is launched while the step before it still runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.capturing.capture import capture_source
from meshwright.core.plan import Precision
from meshwright.core.request import PlanRequest
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.ranks import joined

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LLAMA = f"hf:{Path(__file__).parents[1] / 'assets' / 'llama-tiny.json'}"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": "full"},
    "two microbatches": {"microbatch": 2},
    "compiled": {"compile": True},
}
WARM_STEPS = 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["gpt:layers=2,hidden=64,heads=4,seq=32,vocab=128", LLAMA])
def test_a_step_never_waits_for_the_device(model: str, way: str, precision: Precision) -> None:
    if model == LLAMA:
        pytest.importorskip("transformers")
    source = resolve(model)
    assert source.example is not None
    plan = plain_plan(
        PlanRequest(**{"global_batch": 4, "microbatch": 4, "precision": precision} | WAYS[way]),
        capture_source(source, precision),
        1,
        "",
    )
    batch = source.example(4)
    with joined("cuda") as rank:
        program = apply(
            source.build(),
            plan,
            optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
            objective=source.objective,
            device=rank.device,
        )
        for _ in range(WARM_STEPS):
            program.step(batch)
        with waits_are_errors():
            outputs = [program.step(batch) for _ in range(2)]
        assert outputs[-1].loss < outputs[0].loss


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
