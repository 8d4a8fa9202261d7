"""Activation offload: what chosen blocks save for backward waits on the host, instead of being recomputed.

    forward    each tensor a block saves leaves for the host as it is made; one that is saved several times leaves once
    backward   as one is used, those saved before it are asked back: backward uses them in the opposite order

Parameters, and views and casts of them, stay: they are there anyway. So does what is small: a copy would cost more than it frees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.core.names import expand_names
from meshwright.core.plan import Plan
from meshwright.runtime.offload.link import open_link
from meshwright.runtime.offload.stash import HostStash, Stashed

SMALLEST_BYTES = 64 * 2**10
IN_FLIGHT = 16
REQUESTED_AHEAD = 8
VIEWS_AND_CASTS = ("T", "Transpose", "Permute", "View", "UnsafeView", "Reshape", "ToCopy")
"""Nodes of the graph between a parameter and what is saved of it."""

Key = tuple[StorageWeakRef, int, torch.Size, tuple[int, ...], torch.dtype, int]


def offload_activations(module: nn.Module, plan: Plan, device: torch.device) -> HostStash | None:
    """Wrap the forward of the plan's blocks; the stash they share."""
    names = expand_names(plan.offload.activations)
    if not names:
        return None
    stash = HostStash(open_link(device), device, len(names), IN_FLIGHT)
    offload = ActivationOffload(stash)
    for name in names:
        block = module.get_submodule(name)
        block.forward = offload.around(block.forward)
    return stash


class ActivationOffload:
    def __init__(self, stash: HostStash) -> None:
        self.stash = stash
        self.num_kept = 0
        """Tensors that went to the host so far."""
        self._latest: weakref.ref[_Packed] | None = None
        self._known: dict[Key, weakref.ref[_Packed]] = {}

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*arguments: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **options)
            with saved_tensors_hooks(self._pack, _unpack):
                try:
                    return forward(*arguments, **options)
                finally:
                    self._known.clear()

        return run

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.numel() * tensor.element_size() < SMALLEST_BYTES or _is_of_parameter(tensor):
            return tensor
        key = _key(tensor)
        known = self._known.get(key)
        packed = known() if known is not None else None
        if packed is None:
            packed = _Packed(self.stash.keep(tensor), self._latest)
            self._latest = self._known[key] = weakref.ref(packed)
            self.num_kept += 1
        return packed


class _Packed:
    """What autograd holds in place of a tensor; when it lets go, the room on the host is free."""

    def __init__(self, stashed: Stashed, before: weakref.ref[_Packed] | None) -> None:
        self.stashed, self.before = stashed, before

    def request_those_before(self) -> None:
        one = self.before
        for _ in range(REQUESTED_AHEAD):
            packed = one() if one is not None else None
            if packed is None:
                return
            packed.stashed.request()
            one = packed.before

    def __del__(self) -> None:
        self.stashed.drop()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    tensor: Tensor = packed.stashed.take()
    packed.request_those_before()
    return tensor


def _key(tensor: Tensor) -> Key:
    """Same memory, same place in it, not changed in between. The weak reference keeps the storage's address from being reused."""
    storage = StorageWeakRef(tensor.untyped_storage())
    return (storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)


def _is_of_parameter(tensor: Tensor) -> bool:
    if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
        return True
    node = tensor.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"
