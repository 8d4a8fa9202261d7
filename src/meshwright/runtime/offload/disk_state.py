"""Masters and optimizer state of streamed blocks on disk: the host holds working copies, and the state of a few blocks at a time.

file of a block   [master | state 1 | state 2 …], flat, in the dtype the plan stores; the states are what the optimizer keeps
a step            the state of a block is asked for when its gradients leave, updated in memory, and written to the other
                  generation (`disk_store.py`) while the next is updated; all count together when the step is done
between steps     masters and states are maps of the files that count: a checkpoint reads them as any tensor, and nothing
                  of them is in memory until it does
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.runtime._torch import forget_step_hooks
from meshwright.runtime.offload.block_home import BlockHome
from meshwright.runtime.offload.disk_store import DiskStore, Transfer
from meshwright.runtime.offload.host_updates import StatePlace
from meshwright.runtime.offload.optimizer_part import part_of, step_of_class

NUM_STAGED = 3
"""Blocks whose state is in memory: one that is read, one that is updated, one that is written."""


class DiskState(StatePlace):
    def __init__(self, folder: Path, homes: Mapping[str, BlockHome], dtype: torch.dtype, keys: tuple[str, ...]) -> None:
        """keys: of the tensors that the optimizer keeps for a parameter."""
        self.homes, self.dtype, self.keys = homes, dtype, keys
        parts = 1 + len(keys)
        self.store = DiskStore(
            folder, {name: parts * home.local_elements * dtype.itemsize for name, home in homes.items()}
        )
        largest = max(home.local_elements for home in homes.values())
        self.staged_bytes = NUM_STAGED * parts * largest * dtype.itemsize
        self.optimizer: Optimizer | None = None
        self._free: queue.Queue[Tensor] = queue.Queue()
        for _ in range(NUM_STAGED):
            self._free.put(torch.zeros(parts * largest, dtype=dtype))
        self._reader, self._writer = ThreadPoolExecutor(1, "state-in"), ThreadPoolExecutor(1, "state-out")
        self._coming: dict[str, Future[tuple[Tensor, Transfer]]] = {}
        self._num_commits = 0

    def place_first(self, home: BlockHome, values: list[Tensor]) -> None:
        """The values a block begins with; its states are zeros."""
        room = self._free.get()
        flat = self._flat(home, room).zero_()
        for view, value in zip(home.local_views(flat), values, strict=True):
            view.copy_(value)
        home.rebase(flat[: home.local_elements])
        home.refresh()
        try:
            self.store.write(home.name, flat).wait()
        finally:
            self._free.put(room)

    def request(self, home: BlockHome) -> None:
        self._coming[home.name] = self._reader.submit(self._bring, home)

    @contextmanager
    def at_hand(self, home: BlockHome) -> Iterator[None]:
        room, reading = self._coming.pop(home.name).result()
        try:
            reading.wait()
            flat = self._flat(home, room)
            self._point(home, flat)
            yield
            self._collect(home, flat)
        except BaseException:
            self._free.put(room)
            raise
        self._writer.submit(self._let_go, self.store.write(home.name, flat), room)

    def commit(self) -> None:
        self._num_commits += 1
        self.store.commit(self._num_commits)
        self.rest()

    def rest(self) -> None:
        """Masters and states are those on disk."""
        for name, home in self.homes.items():
            size = (1 + len(self.keys)) * home.local_elements
            self._point(home, torch.from_file(str(self.store.path(name)), shared=True, size=size, dtype=self.dtype))

    def take_over(self) -> None:
        for home in self.homes.values():
            room = self._free.get()
            try:
                flat = self._flat(home, room).zero_()
                for view, master in zip(home.local_views(flat), home.masters, strict=True):
                    view.copy_(master.detach())
                for _, state, key, view in self._states(home, flat):
                    if key in state:
                        view.copy_(state[key])
                self.store.write(home.name, flat).wait()
            finally:
                self._free.put(room)
        self.commit()

    def close(self) -> None:
        for worker in (self._reader, self._writer):
            worker.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def _bring(self, home: BlockHome) -> tuple[Tensor, Transfer]:
        room = self._free.get()
        return room, self.store.read(home.name, self._flat(home, room))

    def _let_go(self, writing: Transfer, room: Tensor) -> None:
        try:
            writing.wait()  # what went wrong is raised by the commit, which waits for the same
        finally:
            self._free.put(room)

    def _flat(self, home: BlockHome, room: Tensor) -> Tensor:
        return room[: (1 + len(self.keys)) * home.local_elements]

    def _point(self, home: BlockHome, flat: Tensor) -> None:
        """Masters, and the states there are by now, at a stretch of memory."""
        home.rebase(flat[: home.local_elements])
        for _, state, key, view in self._states(home, flat):
            if key in state:
                state[key] = view

    def _collect(self, home: BlockHome, flat: Tensor) -> None:
        """States that the optimizer has made anew."""
        for _, state, key, view in self._states(home, flat):
            if key in state and state[key].data_ptr() != view.data_ptr():
                view.copy_(state[key])
                state[key] = view

    def _states(self, home: BlockHome, flat: Tensor) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Tensor]]:
        """Of every master that has states: the state's own dict, its key, and its place."""
        known = self.optimizer.state if self.optimizer is not None else {}
        for number, key in enumerate(self.keys, start=1):
            part = flat[number * home.local_elements : (number + 1) * home.local_elements]
            for master, view in zip(home.masters, home.local_views(part), strict=True):
                if master in known:
                    yield master, known[master], key, view


def state_keys(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the tensors of a parameter's size that an optimizer keeps: found by a step of a parameter of no account."""
    sample = nn.Parameter(torch.zeros(2, 3))
    sample.grad = torch.zeros(2, 3)
    trial = part_of(optimizer, ())
    trial.param_groups = [{**optimizer.param_groups[0], "params": [sample]}]
    trial.state = defaultdict(dict)
    forget_step_hooks(trial)
    step_of_class(trial)
    return tuple(
        key for key, item in trial.state[sample].items() if isinstance(item, Tensor) and item.shape == sample.shape
    )
