"""Gradients that ranks hold parts of, read by a user's own loop between backward and the update.

Under tp, ep and ZeRO a rank's `p.grad` is its part of the gradient. Code that asks for a norm of it, torch's own
`clip_grad_norm_` first of all, must get the norm of the whole gradient, the same on every rank. So from the end of a backward
until the update these gradients are tensors of a class of their own, and torch hands each function called on them to us:

    norms, sum, mean, max, min, any, all, numel, …         over all parts: one all-reduce an axis, the same answer on all ranks
    element by element, and views                          on this rank's part; what comes of it is a part too
    statistics that parts do not add up to, concatenation  refused
    anything else                                          on this rank's part

Norms of all gradients are found together when the first is asked for, and kept until a gradient is changed. A microbatch before
the last of a step leaves gradients that ranks have not added up yet: whoever asks for their norm is refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.collective import Axis
from meshwright.core.errors import PlanError
from meshwright.runtime._torch import DisableTorchFunction, DisableTorchFunctionSubclass
from meshwright.runtime.axis import along
from meshwright.runtime.clip import Axes, local

NOTE = "_meshwright_gradient"
NORMS = ("norm", "linalg_norm", "linalg_vector_norm")
FOREACH_NORM = "_foreach_norm"
COUNTS = ("numel", "nelement")
TOTALS = {
    "sum": dist.ReduceOp.SUM, "nansum": dist.ReduceOp.SUM, "count_nonzero": dist.ReduceOp.SUM, "any": dist.ReduceOp.MAX,
    "all": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "amax": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
    "amin": dist.ReduceOp.MIN,
}  # fmt: skip
REFUSED = (
    "cat", "concat", "concatenate", "stack", "hstack", "vstack", "std", "var", "std_mean", "var_mean", "median", "nanmedian",
    "nanmean", "quantile", "nanquantile", "histc", "kthvalue", "topk", "sort", "argsort", "argmax", "argmin", "aminmax", "prod",
    "logsumexp", "softmax", "log_softmax", "cumsum", "dot", "vdot", "linalg_matrix_norm", "matmul", "mm", "linalg_svd",
)  # fmt: skip
ELEMENTWISE = (
    "pow", "__pow__", "square", "abs", "__abs__", "absolute", "sqrt", "sign", "neg", "__neg__", "float", "double", "half",
    "bfloat16", "to", "type", "clone", "detach", "cpu", "cuda", "isnan", "isinf", "isfinite", "mul", "__mul__", "__rmul__",
    "multiply", "div", "divide", "__truediv__", "true_divide", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__",
    "clamp", "clip", "nan_to_num", "gt", "__gt__", "ge", "lt", "__lt__", "le", "ne", "__ne__", "eq", "__eq__", "log", "log2",
    "flatten", "view", "reshape", "ravel", "contiguous", "data",
)  # fmt: skip


class Whole(Tensor):
    """A number that is the same on every rank; code for `fully_shard` may ask for its full tensor."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            made = function(*args, **(kwargs or {}))
        return made.as_subclass(cls) if type(made) is Tensor and not made.dim() else made

    def full_tensor(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.full_tensor())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)


class ShardedGradient(Tensor):
    """This rank's part of a gradient."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(function, args, kwargs or {})


class ShardedDTensorGradient(DTensor):
    """The same under ZeRO."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(function, args, kwargs or {})


MARKED = (ShardedGradient, ShardedDTensorGradient)
Note = tuple["weakref.ref[Gradients]", Axes]
"""Weak: a gradient that held its model would never be freed with it."""


class Gradients:
    """Of one spread module."""

    def __init__(
        self, parameters: Iterable[tuple[nn.Parameter, Axes]], groups: Mapping[Axis, dist.ProcessGroup]
    ) -> None:
        """groups: the ranks along each axis that divides some parameter."""
        self.parameters = tuple(parameters)
        self.groups = groups
        self.unreduced = ""
        """Why gradients are not what they will be, or ''."""
        self._placed: list[nn.Parameter] = []
        self._known: dict[tuple[int, float], tuple[int, Tensor]] = {}

    def mark(self, gathered: Iterable[nn.Parameter] = ()) -> None:
        """gathered: parameters that stand in the place of their shards until the last microbatch. They have no gradients: what
        is put there is refused when it is read."""
        self._known.clear()
        for parameter in gathered:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = parameter.detach().new_zeros(()).expand(parameter.shape)
                self._placed.append(parameter)
        pairs = (*self.parameters, *((parameter, frozenset[Axis]()) for parameter in self._placed))
        for parameter, axes in pairs:
            gradient = parameter.grad
            if gradient is not None and _is_part(gradient, axes or self.unreduced):
                _mark(gradient, weakref.ref(self), axes)

    def unmark(self) -> None:
        self._known.clear()
        for parameter, _ in self.parameters:
            if isinstance(parameter.grad, MARKED):
                _unmark(parameter.grad)
        for parameter in self._placed:
            parameter.grad = None
        self._placed.clear()

    def norm(self, gradient: Tensor, axes: Axes, order: float) -> Tensor:
        """Of the whole gradient, or of what was made of one."""
        key, version = (id(gradient), order), local_version(gradient)
        if self._known.get(key, (-1, None))[0] != version:
            self._find_all(order)
        if key not in self._known or self._known[key][0] != version:
            return self.norms([(gradient, axes)], order)[0]
        return self._known[key][1]

    def _find_all(self, order: float) -> None:
        found = [(p.grad, axes) for p, axes in self.parameters if isinstance(p.grad, MARKED)]
        norms = self.norms(found, order)
        self._known = {
            (id(gradient), order): (local_version(gradient), norm)
            for (gradient, _), norm in zip(found, norms, strict=True)
        }

    def norms(self, gradients: Sequence[tuple[Tensor, Axes]], order: float) -> list[Tensor]:
        """Σ |g|^order over all parts, to the power of 1/order; the largest for an infinite order."""
        if not gradients:
            return []
        with DisableTorchFunction():
            parts = [torch.linalg.vector_norm(local(gradient), order) for gradient, _ in gradients]
            dtypes = [part.dtype for part in parts]
            together = torch.stack([part.double() for part in parts])
            is_largest = math.isinf(order)
            if not is_largest:
                together = together.pow(order)
            operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
            self._reduce(together, [axes for _, axes in gradients], operation)
            whole = together if is_largest else together.pow(1 / order)
            return [norm.to(dtype).as_subclass(Whole) for norm, dtype in zip(whole, dtypes, strict=True)]

    def total(self, part: Tensor, axes: Axes, operation: Any) -> Tensor:
        """One number of this rank, over all ranks that hold other parts."""
        with DisableTorchFunction():
            together = part.reshape(1).to(torch.int64 if part.dtype == torch.bool else part.dtype).clone()
            self._reduce(together, [axes], operation)
            return together[0].to(part.dtype).as_subclass(Whole)

    def count(self, gradient: Tensor, axes: Axes) -> int:
        with DisableTorchFunction():
            own = torch.tensor(local(gradient).numel(), device=gradient.device)
        return int(self.total(own, axes, dist.ReduceOp.SUM))

    def _reduce(self, together: Tensor, axes: list[Axes], operation: Any) -> None:
        for axis, group in self.groups.items():
            places = [place for place, own in enumerate(axes) if axis in own]
            if places:
                chosen = together[places]
                with along(axis):
                    dist.all_reduce(chosen, op=operation, group=group)
                together[places] = chosen


def _is_part(gradient: Tensor, is_known: Any) -> bool:
    """A DTensor is one always: its norm is to be a plain number, as that of the others."""
    return type(gradient) is DTensor or (type(gradient) is Tensor and bool(is_known))


def local_version(gradient: Tensor) -> int:
    with DisableTorchFunction():
        return int(local(gradient)._version)


def _mark(gradient: Tensor, home: weakref.ref[Gradients], axes: Axes) -> Tensor:
    vars(gradient)[NOTE] = (home, axes)
    gradient.__class__ = ShardedDTensorGradient if type(gradient) is DTensor else ShardedGradient
    return gradient


def _unmark(gradient: Tensor) -> Note:
    gradient.__class__ = DTensor if isinstance(gradient, DTensor) else Tensor
    note: Note = vars(gradient).pop(NOTE)
    return note


def _answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = _name(function)
    marked = [value for value in _flat(args, kwargs) if isinstance(value, MARKED)]
    marked = list({id(value): value for value in marked}.values())
    notes: list[Note] = [vars(value)[NOTE] for value in marked]
    home, axes = notes[0][0](), notes[0][1]
    if home is None:
        return _run_on_parts(function, args, kwargs, marked)
    reads = name in NORMS or name in TOTALS or name in REFUSED or name in (FOREACH_NORM, "mean") or "clamp" in name
    if reads and home.unreduced:
        raise PlanError(f"'{name}' of a gradient: {home.unreduced}")
    if name in REFUSED:
        raise PlanError(
            f"'{name}' of gradients that lie over {', '.join(sorted(axes))}: each rank has its part, and the answer would be "
            "another on each; use norms, sums or mw.clip_grad_norm_, or gather the gradients first"
        )
    if name in COUNTS:
        return home.count(marked[0], axes)
    if name == FOREACH_NORM:
        return _foreach_norm(home, *args, **kwargs)
    if name in NORMS:
        return home.norm(marked[0], axes, _order(name, marked[0], args, kwargs))
    if name in TOTALS or name == "mean":
        return _total(home, name, function, args, kwargs, axes)
    made = _run_on_parts(function, args, kwargs, marked)
    is_new = type(made) in (Tensor, DTensor) and all(made is not value for value in marked)
    return _mark(made, notes[0][0], axes) if name in ELEMENTWISE and is_new else made


def _run_on_parts(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], marked: Sequence[Tensor]
) -> Any:
    """The function itself, on tensors as torch made them. A number that is the same on all ranks meets parts in place, since a
    DTensor takes no plain tensor beside it."""
    notes = [_unmark(value) for value in marked]
    try:
        if any(isinstance(value, Whole) for value in _flat(args, kwargs)):
            with DisableTorchFunctionSubclass():
                made = function(*map(_as_part, args), **{key: _as_part(value) for key, value in kwargs.items()})
            return args[0] if _changes_in_place(function) else made
        return function(*args, **kwargs)
    finally:
        for value, note in zip(marked, notes, strict=True):
            _mark(value, *note)


def _as_part(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_as_part, value))
    return local(value) if isinstance(value, DTensor) else value


def _changes_in_place(function: Callable[..., Any]) -> bool:
    name = _name(function)
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _total(
    home: Gradients, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], axes: Axes
) -> Tensor:
    gradient = args[0] if args else kwargs.get("input")
    if len(args) > 1 or {"dim", "axis", "other"} & set(kwargs) or not isinstance(gradient, MARKED):
        raise PlanError(
            f"'{name}' along a dim of a gradient that lies over {', '.join(sorted(axes))}: each rank has its part; reduce the "
            "whole gradient, or gather it first"
        )
    if name == "mean":
        return _total(home, "sum", Tensor.sum, args, kwargs, axes) / home.count(gradient, axes)
    with DisableTorchFunction():
        part = getattr(local(gradient), name)(**{key: value for key, value in kwargs.items() if key != "input"})
    return home.total(part, axes, TOTALS[name])


def _foreach_norm(home: Gradients, tensors: Sequence[Tensor], ord: float = 2.0, dtype: Any = None) -> list[Tensor]:
    pairs = [(tensor, vars(tensor)[NOTE][1] if isinstance(tensor, MARKED) else frozenset()) for tensor in tensors]
    return home.norms(pairs, float(ord))


def _order(name: str, gradient: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The order of a norm of all elements; others are refused."""
    options = dict(zip(("input", "order", "dim"), args, strict=False)) | kwargs
    asked = next((options[key] for key in ("order", "p", "ord") if key in options), None)
    is_of_matrix = name == "linalg_norm" and asked not in (None, "fro") and len(gradient.shape) == 2
    order = 2.0 if asked in (None, "fro") else asked
    if is_of_matrix or options.get("dim") is not None or not isinstance(order, int | float) or order <= 0:
        raise PlanError(
            f"'{name}' with order {asked}, dim {options.get('dim')} of a gradient that ranks hold parts of: ask for a norm of "
            "all its elements, or gather it first"
        )
    return float(order)


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    for value in (*args, *kwargs.values()):
        yield from value if isinstance(value, list | tuple) else (value,)


def _name(function: Any) -> str:
    """Of an attribute, its own name: torch asks for it through `__get__`."""
    name = getattr(function, "__name__", str(function))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else str(name)
