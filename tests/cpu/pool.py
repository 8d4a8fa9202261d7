"""Ranks that stay: processes in one gloo group, which run one function after another for many tests.

The test process sends a module-level function and its arguments through a pipe; every rank calls it and sends back what
it returned, or its traceback. Groups that a call made are destroyed after it. A rank that raises while others wait for it
leaves the group useless: then all ranks are ended, and the next call starts new ones.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

PATIENCE_SECONDS = 120.0
"""For one call on all ranks; a hang is a failure, not a wait."""
GRACE_SECONDS = 10.0
"""For the others, after one rank has raised."""


Start = Literal["forkserver", "spawn"]
QUIET = {"KINETO_LOG_LEVEL": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}
LOADED = [
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.profiler", "pytest", "transformers.modeling_utils", "meshwright.measure.parity", "meshwright.runtime.apply",
    "meshwright.training.loop", "meshwright.measure.probe", "meshwright.cli.app", "meshwright.searching.search",
]  # fmt: skip
"""What ranks need sooner or later, and may share: nothing that starts a thread when it is loaded."""


@dataclass(frozen=True)
class Answer:
    """What one rank made of a call."""

    value: Any = None
    error: str = ""
    """Class and message of what it raised; empty when it returned."""
    trace: str = ""


class RankError(Exception):
    """Some rank raised. `errors` holds class and message by rank."""

    def __init__(self, answers: dict[int, Answer]) -> None:
        self.errors = {rank: answer.error for rank, answer in answers.items() if answer.error}
        (first, trace), *others = [(rank, answer.trace) for rank, answer in answers.items() if answer.error]
        also = "".join(f"rank {rank}: {self.errors[rank]}\n" for rank, _ in others)
        super().__init__(f"rank {first}: {trace}{also}")


class RankPool:
    """A fixed number of ranks, started when first used."""

    def __init__(self, num_ranks: int, start: Start = "forkserver") -> None:
        """start: spawned ranks take the environment of now, forked ones that of the first pool."""
        self.num_ranks = num_ranks
        self.start: Start = start
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a module-level function on every rank; what each returned, in the order of ranks."""
        return self.run_each(function, [arguments] * self.num_ranks)

    def run_each(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same, with arguments of their own for every rank."""
        if not self._processes:
            self._start()
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((function, own))
        answers = self._collect()
        agree = len(answers) == self.num_ranks and len({bool(answer.error) for answer in answers.values()}) == 1
        if not agree or not all(process.is_alive() for process in self._processes):
            self.close()
        if len(answers) < self.num_ranks and not any(answer.error for answer in answers.values()):
            missing = sorted(set(range(self.num_ranks)) - set(answers))
            raise TimeoutError(f"ranks {missing} of {self.num_ranks} did not answer")
        if any(answer.error for answer in answers.values()):
            raise RankError(answers)
        return [answers[rank].value for rank in range(self.num_ranks)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = forking() if self.start == "forkserver" else multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-pool-")
        store = Path(self._folder.name, "store")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.num_ranks, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        open_pipes = dict(zip(self._pipes, range(self.num_ranks), strict=True))
        while open_pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), timeout=left):
                rank = open_pipes.pop(pipe)  # type: ignore[index]
                answers[rank] = _receive(pipe, self._processes[rank])  # type: ignore[arg-type]
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return dict(sorted(answers.items()))


def forking() -> Any:
    """Ranks are forked from a process that has torch loaded and has done nothing with it: to load it takes seconds a rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    before = dict(os.environ)
    os.environ |= QUIET  # torch reads them when it is loaded
    try:
        forkserver.ensure_running()
    finally:
        for name in QUIET.keys() - before.keys():
            del os.environ[name]
    return context


def _receive(pipe: Connection, process: Any) -> Answer:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join(1)
        words = f"the process ended with exit code {process.exitcode}"
        return Answer(error=words, trace=words)


def _serve(number: int, num_ranks: int, store: str, pipe: Connection) -> None:
    """The life of one rank."""
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "0", **QUIET,
    }  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what was loaded stays: to look through it after every call takes longer than many a call
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=number,
        world_size=num_ranks,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_answer(function, arguments))


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Answer:
    import torch
    import torch.distributed as dist

    before = set(_groups())
    torch.manual_seed(0)
    try:
        answer = Answer(value=function(*arguments))
    except BaseException as error:  # torch's CheckpointException is no Exception
        answer = Answer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    gc.collect()
    for group in [group for group in _groups() if group not in before]:
        dist.destroy_process_group(group)
    _forget_meshes()
    gc.collect()  # a group that is left over keeps its threads, and some of them never sleep
    return answer


def _forget_meshes() -> None:
    """torch remembers how ops lie over a mesh, and with it the mesh's groups: the next one of the same shape has others."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def _groups() -> list[Any]:
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def this_rank() -> Any:
    """The calling process as Meshwright's Rank."""
    from meshwright.runtime.ranks import join

    return join("cpu", "gloo")
