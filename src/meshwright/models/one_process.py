"""What a model's own code learns from torch.distributed: wherever Meshwright builds or calls a model, that it runs in one process.

Layers ask `is_initialized()` or `get_world_size()`, and then exchange what they computed with every rank: codebooks, loads of
experts, statistics of a batch. They take each rank for a replica with samples of its own. Ranks of tp, cp and pp hold parts of one
replica: such a layer would add a tensor to itself, or wait for a stage that never calls it.

    questions      get the answers of one process, so that the model computes what one process computes
    collectives    that are called all the same are refused, with their line

Code of torch and of Meshwright asks and calls as ever: who asks is read from the caller's frame. Where a plan only cuts the batch,
ranks are replicas, and a model that runs there sees them as it would under DistributedDataParallel (`as_replicas`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.models.location import line_now

ANSWERS = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip
COLLECTIVES = tuple(name for name in _NAMES if hasattr(dist, name))
"""torch 2.13 has further names for two of them."""
OTHERS = ("torch", "meshwright")
"""Packages whose own calls are none of the model's."""
LAYERS = ("torch.nn.modules.batchnorm",)
"""Modules of torch whose layers ask as a model's own do: SyncBatchNorm."""
PASSED_ON = ("torch.distributed.nn", "torch.autograd.function")
"""Modules of torch in which a call of the model's is passed on."""
Function = Callable[..., Any]

_views: list[str] = []
"""The outermost decides."""


@contextmanager
def as_one_process() -> Iterator[None]:
    """While this lasts, the model's code sees one process."""
    if _views or not dist.is_available() or not dist.is_initialized():
        yield
        return
    with _seen("one process"), ExitStack() as stack:
        for name in (*ANSWERS, *COLLECTIVES):
            for module in (dist, distributed_c10d):
                stack.callback(setattr, module, name, getattr(module, name))
            stand_in = (_answered if name in ANSWERS else _refused)(name, getattr(distributed_c10d, name))
            for module in (dist, distributed_c10d):
                setattr(module, name, stand_in)
        yield


def seen_under(plan: Plan) -> AbstractContextManager[None]:
    """What the model's code sees while it runs as the plan says."""
    return as_one_process() if plan.mesh.divides_model else as_replicas()


@contextmanager
def as_replicas() -> Iterator[None]:
    """While this lasts, the model's code sees ranks as they are."""
    with _seen("replicas"):
        yield


@contextmanager
def _seen(view: str) -> Iterator[None]:
    _views.append(view)
    try:
        yield
    finally:
        _views.pop()


def _answered(name: str, real: Function) -> Function:
    @wraps(real)
    def ask(*arguments: Any, **options: Any) -> Any:
        return ANSWERS[name] if _is_of_model(sys._getframe(1)) else real(*arguments, **options)

    return ask


def _refused(name: str, real: Function) -> Function:
    @wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        if _is_of_model(sys._getframe(1)):
            raise PlanError(
                f"the model's own code calls torch.distributed.{name} ({line_now()}), for which every rank is a replica with "
                "samples of its own; under this plan ranks hold parts of one. Let the model compute that as in one process (build "
                "it before the process group exists, or ask torch.distributed.is_initialized() where it runs: it answers False "
                "there), or cut only the batch (tp, cp, pp and ep of 1)"
            )
        return real(*arguments, **options)

    return call


def _is_of_model(frame: FrameType | None) -> bool:
    """Whether code of neither torch nor Meshwright calls, or a layer that exchanges statistics."""
    while frame is not None and _module(frame).startswith(PASSED_ON):
        frame = frame.f_back
    if frame is None:
        return False
    name = _module(frame)
    return name in LAYERS or name.partition(".")[0] not in OTHERS


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
