"""A plan that runs: on both ranks, or in a process of its own beside rank 0 where it is for one device."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.core.plan import Plan


class Contestant:
    """One plan, on all ranks or on one device."""

    def __init__(self, plan: Plan, model: str, number: int, solo: Solo | None) -> None:
        self.plan, self.model, self.number, self.solo = plan, model, number, solo
        self.program: Running | None = None
        self.groups: list[Any] = []

    def build(self) -> str:
        """Why it does not run, the same on all ranks; empty where it does."""
        import torch.distributed as dist

        before = set(process_groups())
        error = self._alone("build", (self.plan, self.model)) if self.plan.world == 1 else self._build()
        self.groups = [group for group in process_groups() if group not in before]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, error or "")
        return next(filter(None, every), "")

    def _build(self) -> str:
        from meshwright.core.errors import MeshwrightError

        try:
            self.program = Running(self.plan, self.model)
        except (MeshwrightError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def turn(self, num_steps: int) -> tuple[float, float]:
        """Seconds of a step, and seconds of the processor in it, the larger of the ranks'."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        if self.plan.world == 1:
            own = self._alone("turn", num_steps) or (0.0, 0.0)
        else:
            assert self.program is not None
            own = self.program.turn(num_steps)
        seconds = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds[0]), float(seconds[1])

    def drop(self) -> None:
        import torch.distributed as dist

        if self.plan.world == 1:
            self._alone("drop", None)
        self.program = None
        gc.collect()
        dist.barrier()
        for group in self.groups:
            with suppress(ValueError):  # one that another mesh has taken down already
                dist.destroy_process_group(group)
        self.groups = []

    def _alone(self, what: str, argument: Any) -> Any:
        return self.solo.ask(what, self.number, argument) if self.solo is not None else None


class Running:
    """A program and its batch."""

    def __init__(self, plan: Plan, model: str) -> None:
        import torch

        from meshwright.models.source import resolve
        from meshwright.runtime.apply import apply

        source = resolve(model)
        assert source.example is not None
        torch.manual_seed(0)
        adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
        self.program = apply(source.build(), plan, optimizer=adamw, objective=source.objective)
        self.batch = source.example(plan.global_batch)

    def turn(self, num_steps: int) -> tuple[float, float]:
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            self.program.step(self.batch)
        return (time.perf_counter() - started) / num_steps, (time.process_time() - busy) / num_steps


class Solo:
    """A process beside this rank, alone in its group, that runs plans for one device."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()

    def ask(self, what: str, number: int, argument: Any) -> Any:
        self.pipe.send((what, number, argument))
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self.process.join()


def serve(pipe: Connection) -> None:
    """The life of the process beside rank 0."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    running: dict[int, Running] = {}
    while True:
        try:
            what, number, argument = pipe.recv()
        except EOFError:
            os._exit(0)
        answer: Any = ""
        if what == "build":
            running[number] = Running(*argument)
        elif what == "turn":
            answer = running[number].turn(argument)
        else:
            running.pop(number, None)
            gc.collect()
        pipe.send(answer)


def process_groups() -> list[Any]:
    """Every group of this process: a plan's own are taken down with it, or sockets run out."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)
