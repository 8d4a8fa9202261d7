"""This process as a rank of a job: its number, its device, its process group."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.runtime.messages.exchange import from_first
from meshwright.runtime.rank import leave, report, started_by_launcher
from meshwright.runtime.rendezvous import local_only
from meshwright.runtime.watchdog import TIMEOUT_SECONDS, Watchdog, is_first_to_say, remember_collectives

DeviceChoice = Literal["auto", "cpu", "cuda"]
BackendChoice = Literal["auto", "gloo", "nccl"]

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
LEAST_JOIN_SECONDS = 20.0
"""For all ranks to come: however short others may wait for a rank later, it starts in its own time."""


@dataclass(frozen=True)
class Rank:
    number: int
    num_ranks: int
    local_number: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.number == 0


def choose_device(choice: DeviceChoice, local_number: int, num_local: int, backend: BackendChoice) -> torch.device:
    """The device of one rank: a GPU each where there are GPUs, else the CPU."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            "device 'cuda' was asked for, but torch sees no GPU: use --device cpu, or install a CUDA build of torch"
        )
    num_gpus = torch.cuda.device_count()
    if num_local > num_gpus and backend != "gloo":
        raise InputError(
            f"{num_local} ranks but {num_gpus} GPUs: run at most {num_gpus} ranks here, or --backend gloo to share a GPU"
        )
    return torch.device("cuda", local_number % num_gpus)


@contextmanager
def joined(
    device: DeviceChoice = "auto",
    backend: BackendChoice = "auto",
    timeout_seconds: float = TIMEOUT_SECONDS,
    hang_report: Path | None = None,
) -> Iterator[Rank]:
    """Join the job's process group, and leave it in the end. After an error it is left as it is: a group with a broken
    peer may hang while it is taken down, and the process is about to end.

    timeout_seconds: after so long a wait for another rank the process ends, with words that name that rank; 0: never.
    hang_report: a file for the stacks of all ranks, should it come to that.
    """
    if timeout_seconds and started_by_launcher():
        remember_collectives()
    rank = join(device, backend, timeout_seconds)
    watchdog = None
    if timeout_seconds and rank.num_ranks > 1:
        attempt = from_first(lambda: uuid.uuid4().hex, str)
        watchdog = Watchdog(rank.number, rank.num_ranks, timeout_seconds, end_with, attempt, hang_report)
        watchdog.start()
    try:
        yield rank
    except BaseException:
        if watchdog is not None:
            watchdog.speak_first()
        raise
    finally:
        if watchdog is not None:
            watchdog.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def end_with(error: MeshwrightError) -> NoReturn:
    """End this rank, whatever it is doing, with one message for the whole job."""
    if is_own_rank():
        report(error)
    elif is_first_to_say():
        print(f"error: {error}", file=sys.stderr)
    leave(1)


def is_own_rank() -> bool:
    """Whether our own launcher started this process: it says what there is to say."""
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    return specification is not None and specification.name == "meshwright.runtime.rank"


def join(device: DeviceChoice = "auto", backend: BackendChoice = "auto", timeout_seconds: float = 0.0) -> Rank:
    """Join the process group torchrun described in the environment; alone where it described none.

    timeout_seconds: how long to wait for the others to come; 0: as long as torch's own collectives may take.
    """
    if not started_by_launcher():
        return _alone(device, backend)
    number, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_number = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    chosen = choose_device(device, local_number, num_local, backend)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        patience = (
            timedelta(seconds=max(timeout_seconds, LEAST_JOIN_SECONDS)) if timeout_seconds else COLLECTIVE_TIMEOUT
        )
        dist.init_process_group(backend_name(chosen, backend), timeout=patience)
    return Rank(number, num_ranks, local_number, chosen)


def rank_of(device: torch.device) -> Rank:
    """This process in the group it has joined, with the device that its program runs on."""
    return Rank(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), device)


def _alone(device: DeviceChoice, backend: BackendChoice) -> Rank:
    chosen = choose_device(device, 0, 1, backend)
    if not dist.is_initialized():
        os.environ.update(local_only())  # groups of a mesh are made later, and listen too
        dist.init_process_group(backend_name(chosen, backend), store=dist.HashStore(), rank=0, world_size=1)
    return Rank(0, 1, 0, chosen)


def backend_name(device: torch.device, choice: BackendChoice) -> str:
    """NCCL for tensors on GPUs and gloo for those on the CPU; gloo alone takes both."""
    if device.type == "cpu":
        if choice == "nccl":
            raise InputError("backend 'nccl' needs GPUs: use gloo")
        return "gloo"
    return "gloo" if choice == "gloo" else "cpu:gloo,cuda:nccl"
