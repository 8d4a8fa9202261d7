"""A program that is closed leaves nothing behind: no thread, no file, no communicator, whatever its plan."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import MODELS, graph_of, source_of
from pool import RankPool, this_rank

from meshwright.core.errors import PlanError, RunError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.planner.shardings import with_legal_sharding
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.offload.optimizer import HostOptimizer
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]
PATIENCE_SECONDS = 60
PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one process": (1, "gpt", {}),
    "replicas": (2, "gpt", {}),
    "ZeRO 1": (2, "gpt", {"zero": 1}),
    "ZeRO 3": (2, "gpt", {"zero": 3}),
    "hybrid ZeRO": (4, "gpt", {"zero": 3, "hybrid": 2}),
    "tp": (2, "gpt", {"tp": 2}),
    "cp": (2, "gpt", {"cp": 2}),
    "pp": (2, "gpt", {"pp": 2}),
    "pp by dp": (4, "gpt", {"pp": 2, "zero": 1}),
    "ep": (2, "switch", {"ep": 2}),
    "optimizer on the host": (1, "gpt", {"offload": "optimizer"}),
    "optimizer on the host, ZeRO 2": (2, "gpt", {"offload": "optimizer", "zero": 2}),
    "parameters on the host": (1, "gpt", {"offload": "parameters", "recompute": "full"}),
    "parameters on the host, ZeRO 3": (2, "gpt", {"offload": "parameters", "recompute": "full", "zero": 3}),
}


def plan_of(model: str, num_ranks: int, asked: dict[str, Any]) -> Plan:
    request = PlanRequest(**{"global_batch": 8, "microbatch": 1, **asked})
    return with_legal_sharding(plain_plan(request, graph_of(model), num_ranks, "tests"), MODELS[model])


def program_of(model: str, plan: Plan) -> Program:
    source = source_of(model)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    return apply(source.build(), plan, optimizer=optimizer, objective=source.objective, device=this_rank().device)


def held() -> dict[str, Any]:
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python's threads": sorted(thread.name for thread in threading.enumerate()),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "turns": sys.getswitchinterval(),
    }


def two_programs(model: str, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """What there was before the second of them, and after it: the first starts what a process keeps, as torch's own threads."""
    found: list[dict[str, Any]] = []
    for _ in range(2):
        example = source_of(model).example
        assert example is not None
        with program_of(model, plan) as program:
            for _ in range(2):
                program.step(example(plan.global_batch))
        dist.barrier()
        found.append(held())
        for _ in range(100):  # a thread that was joined may still be in the kernel's list
            if found[-1] == found[0]:
                break
            time.sleep(0.05)
            found[-1] = held()
        dist.barrier()
    return found[0], found[1]


@pytest.mark.parametrize("name", PLANS)
def test_nothing_outlives_a_program(pool: Pools, name: str) -> None:
    num_ranks, model, asked = PLANS[name]
    for before, after in pool(num_ranks).run(two_programs, model, plan_of(model, num_ranks, asked)):
        assert after == before


def closed(model: str, plan: Plan) -> str:
    program = program_of(model, plan)
    program.close()
    program.close()
    assert program.plan == plan
    with pytest.raises(RunError) as error:
        program.step({})
    return str(error.value)


def test_a_closed_program_says_so(pool: Pools) -> None:
    (said,) = pool(1).run(closed, "gpt", plan_of("gpt", 1, {}))
    assert "closed" in said
    assert "apply" in said


def forgotten(plan: Plan) -> tuple[Any, Any]:
    """Nobody closes it, and nobody holds it."""
    source = source_of("gpt")
    assert source.example is not None
    before = optimizers_and_threads()
    program = program_of("gpt", plan)
    program.step(source.example(plan.global_batch))
    assert optimizers_and_threads() != before
    del program
    deadline = time.monotonic() + PATIENCE_SECONDS
    while optimizers_and_threads() != before and time.monotonic() < deadline:
        time.sleep(0.1)  # its thread may be ending a task, and holds it until then
    return before, optimizers_and_threads()


def optimizers_and_threads() -> tuple[int, list[str]]:
    gc.collect()
    return sum(type(one) is HostOptimizer for one in gc.get_objects()), sorted(
        thread.name for thread in threading.enumerate()
    )


def test_a_host_optimizer_is_freed_when_nobody_holds_it(pool: Pools) -> None:
    ((before, after),) = pool(1).run(forgotten, plan_of("gpt", 1, {"offload": "optimizer"}))
    assert after == before


def traced(plan: Plan) -> None:
    source = source_of("gpt")
    with pytest.raises(PlanError, match="find_nan"):
        apply(source.build(), plan, optimizer=lambda p: torch.optim.AdamW(p), find_nan=True)


def test_streamed_parameters_are_not_traced(pool: Pools) -> None:
    pool(1).run(traced, plan_of("gpt", 1, {"offload": "parameters", "recompute": "full"}))


def failing(plan: Plan) -> str:
    """More blocks than buffers, and every update fails: backward must not wait for a buffer that never comes."""
    source = source_of("gpt")
    assert source.example is not None
    program = program_of("gpt", plan)
    updates = program.streams.updates  # type: ignore[attr-defined]
    while updates._free.qsize() > 1:
        updates._free.get()

    def fail(tasks: object) -> None:
        raise OSError("no such memory")

    updates._rule.begin = fail
    updates._tasks = lambda arrived, part: fail(arrived)
    with pytest.raises(OSError, match="no such memory") as error:
        program.step(source.example(plan.global_batch))
    program.close()
    return str(error.value)


def test_updates_that_fail_end_the_step(pool: Pools) -> None:
    plan = plan_of("gpt", 1, {"offload": "parameters", "recompute": "full"})
    assert pool(1).run(failing, plan) == ["no such memory"]
