"""What a checkpoint holds of an optimizer on the host: masters in place of 16-bit parameters, and state as if on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.runtime.clip import local
from meshwright.runtime.offload.kept import Kept
from meshwright.runtime.offload.optimizer import HostOptimizer
from meshwright.runtime.offload.pieces import Shipped
from meshwright.runtime.offload.rules import AdamRule, State


def masters_of(host: HostOptimizer) -> dict[int, Tensor]:
    """By the parameter's id, in the shape it has for its rank; the same memory where that is possible."""
    return {id(one.parameter): _like(one.parameter, _master(one)) for one in host.state.holders}


def states_of(host: HostOptimizer) -> dict[str, State]:
    """By the parameter's name."""
    return {one.name: _state(one) for one in host.state.holders}


def zeros_of(host: HostOptimizer) -> dict[str, Callable[[], Tensor]]:
    """By the parameter's name: room for a tensor of state, in the shape that its rank has of it."""
    return {one.name: partial(_zeros, one) for one in host.state.holders}


def _zeros(one: Shipped | Kept) -> Tensor:
    return _like(one.parameter, torch.zeros_like(_master(one)))


def late_of(host: HostOptimizer) -> dict[str, Tensor]:
    """By the parameter's name: what the device computes the next step with, where the last update is late; in the dtype of the
    masters, so that any plan can read it. Call it when the host rests."""
    return {one.name: _like(one.parameter, _on_device(one)) for one in host.state.shipped}


def _on_device(one: Shipped) -> Tensor:
    return local(one.parameter.detach()).to(one.master.dtype)


@torch.no_grad()
def load_late(host: HostOptimizer, late: Mapping[str, Tensor], num_steps: int) -> None:
    """After `load`: the device has these parameters, and owes itself the last update. Others, which the plan that saved them kept
    on the device, are the newest."""
    for one in host.state.shipped:
        if one.name in late:
            local(one.parameter.detach()).copy_(local(late[one.name]))
    host.owe(num_steps)


@torch.no_grad()
def load(host: HostOptimizer, masters: Mapping[str, Tensor], states: Mapping[str, State]) -> None:
    """What was loaded becomes the state on the host, and the device's parameters follow from it."""
    host.settle()
    for one in host.state.holders:
        _master(one).copy_(local(masters[one.name]))
        local(one.parameter.detach()).copy_(_master(one))
        if one.name in states:
            _take(one, states[one.name], isinstance(host.state.rule, AdamRule))


def _master(one: Shipped | Kept) -> Tensor:
    return one.master if isinstance(one, Shipped) else one.weight


def _like(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _state(one: Shipped | Kept) -> State:
    if isinstance(one, Kept):
        return {key: _shaped(one, item) for key, item in one.state.items()}
    if one.moments:
        step = torch.tensor(float(one.pieces[0].state["step"]))
        wide = {
            key: moment.to(one.master.dtype) for key, moment in one.moments.items()
        }  # 16 bits are a plan's own affair
        return {"step": step, **{key: _like(one.parameter, moment) for key, moment in wide.items()}}
    first = one.pieces[0].state if one.pieces else {}
    return {key: _joined(one, key) for key in first}


def _joined(one: Shipped, key: str) -> Any:
    """Pieces of a tensor that a rule keeps piece by piece; what is one number is the same for all."""
    found = [piece.state[key] for piece in one.pieces]
    if not isinstance(found[0], Tensor) or found[0].shape != one.pieces[0].master.shape:
        return found[0]
    whole = torch.cat([part.reshape(-1) for part in found]).view(one.master.shape)
    return _like(one.parameter, whole)


def _shaped(one: Kept, item: Any) -> Any:
    return _like(one.parameter, item) if isinstance(item, Tensor) and item.shape == one.weight.shape else item


def _take(one: Shipped | Kept, state: State, counts_steps: bool) -> None:
    if isinstance(one, Kept):
        one.state = {
            key: _own(item).to(one.weight.device) if _is_like(one, item) else _copy(item) for key, item in state.items()
        }
        return
    for piece in one.pieces:
        for key, item in state.items():
            if key == "step" and counts_steps:
                piece.state["step"] = int(item)
            elif not _is_like(one, item):
                piece.state[key] = _copy(item)
            else:
                part = _own(item).reshape(-1)[piece.first : piece.last].view(piece.master.shape)
                piece.state[key] = piece.state[key].copy_(part) if key in piece.state else part.to("cpu").clone()


def _is_like(one: Shipped | Kept, item: Any) -> bool:
    return isinstance(item, Tensor) and local(item).shape == _master(one).shape and _master(one).dim() > 0


def _own(item: Tensor) -> Tensor:
    return local(item).detach()


def _copy(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) else item
