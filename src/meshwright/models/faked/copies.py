"""A copy of a module that calls its own parts.

Functions are not copied by `copy.deepcopy`: a lambda that a constructor wrote (`self.mlpf = lambda x: m.c_proj(m.act(x))`) would
go on calling the module it was written for. In the copy it is given the copies of what it refers to.
"""

from __future__ import annotations

import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

REFUSE_COPIES = (torch.jit.ScriptFunction, staticmethod)
"""Kinds of functions that `copy.deepcopy` fails on; they hold nothing that differs, or are given it afterwards."""
_PLAIN = (str, bytes, int, float, type(None))


def copy_module(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    """made: id of an object → what stands for it in the copy."""
    memo = dict(made)
    for part in module.modules():
        memo.update((id(value), value) for value in vars(part).values() if isinstance(value, REFUSE_COPIES))
    copied = copy.deepcopy(module, memo)
    rebound: dict[int, Any] = {}
    for part in copied.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, dict):  # hooks
                for key, inside in list(value.items()):
                    value[key] = _rebind(inside, memo, rebound)
            else:
                vars(part)[name] = _rebind(value, memo, rebound)
    return copied


def _rebind(value: Any, memo: dict[int, Any], rebound: dict[int, Any]) -> Any:
    """The function with copies in place of what it refers to; other values as they are."""
    if isinstance(value, FunctionType):
        return _rebind_function(value, memo, rebound)
    if isinstance(value, partial):
        given = [_replaced(one, memo, rebound) for one in value.args]
        function: Any = _replaced(value.func, memo, rebound)
        return partial(
            function, *given, **{name: _replaced(one, memo, rebound) for name, one in value.keywords.items()}
        )
    if isinstance(value, staticmethod):
        return staticmethod(_rebind(value.__func__, memo, rebound))
    if isinstance(value, MethodType):
        return MethodType(_rebind(value.__func__, memo, rebound), _replaced(value.__self__, memo, rebound))
    return value


def _rebind_function(function: FunctionType, memo: dict[int, Any], rebound: dict[int, Any]) -> Any:
    if id(function) in rebound:
        return rebound[id(function)][1]
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    rebound[id(function)] = (function, made)  # before its variables: it may be one of them
    changed = _fill(cells, function.__closure__ or (), memo, rebound)
    defaults = tuple(_replaced(one, memo, rebound) for one in function.__defaults__ or ())
    named = {name: _replaced(one, memo, rebound) for name, one in (function.__kwdefaults__ or {}).items()}
    before = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not changed and all(one is other for one, other in zip((*defaults, *named.values()), before, strict=True)):
        rebound[id(function)] = (function, function)
        return function
    made.__defaults__, made.__kwdefaults__ = defaults or None, named or None
    made.__dict__.update(function.__dict__)
    return made


def _fill(
    cells: tuple[CellType, ...], like: tuple[CellType, ...], memo: dict[int, Any], rebound: dict[int, Any]
) -> bool:
    """Whether any holds something else than before."""
    changed = False
    for cell, before in zip(cells, like, strict=True):
        try:
            held = before.cell_contents
        except ValueError:  # not filled yet
            continue
        cell.cell_contents = _replaced(held, memo, rebound)
        changed = changed or cell.cell_contents is not held
    return changed


def _replaced(one: Any, memo: dict[int, Any], rebound: dict[int, Any]) -> Any:
    if isinstance(one, _PLAIN):
        return one
    return memo[id(one)] if id(one) in memo and not isinstance(one, FunctionType) else _rebind(one, memo, rebound)
