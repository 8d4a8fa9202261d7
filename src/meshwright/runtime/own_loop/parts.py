"""Parameters and gradients that ranks hold parts of, read by a user's own loop outside of forward, backward and update.

Under tp, ep and ZeRO a rank's `p.grad` is its part of the gradient, and under tp and ep `p` is its part of the parameter. Code
that asks for a norm of them, torch's own `clip_grad_norm_` first of all, must get the norm of the whole, the same on every rank.
So while the loop's own code runs they are tensors of a class of their own, and torch hands each function called on them to us:

    norms, sum, mean, max, min, any, all, numel, …         over all parts: one all-reduce an axis, the same answer on all ranks
    element by element, and views                          on this rank's part; what comes of it is a part too
    statistics that parts do not add up to, concatenation  refused
    anything else                                          on this rank's part; refused where it would make a tensor of a parameter

A loss may hold sums and norms of parameters (a penalty on weights): each rank's part gets its own gradient. Norms of all
gradients are found together when the first is asked for, and kept until a gradient is changed. A microbatch before the last of a
step leaves gradients that ranks have not added up yet: whoever asks for their norm is refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.axes import Axis
from meshwright.core.errors import PlanError
from meshwright.runtime._torch import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    tree_flatten,
    tree_unflatten,
)
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


class _Answered:
    """Functions on it are answered here."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(function, args, kwargs or {})


class Part(_Answered, Tensor):
    """This rank's part of a gradient, or of what was made of one or of a parameter."""


class PartOfParameter(_Answered, nn.Parameter):
    """This rank's part of a parameter; or all of one whose gradients ranks add up, see `Parts.owed`."""


class ShardedPart(_Answered, DTensor):
    """The same under ZeRO."""

    __slots__ = ()


MARKED = (Part, PartOfParameter, ShardedPart)


class Note(NamedTuple):
    home: weakref.ref[Parts]
    """Weak: a tensor that held its model would never be freed with it."""
    axes: Axes
    what: Literal["gradient", "parameter"] = "gradient"
    """What it is a part of, or was made of."""


class Parts:
    """Of one spread module."""

    def __init__(
        self, parameters: Iterable[tuple[nn.Parameter, Axes]], groups: Mapping[Axis, dist.ProcessGroup]
    ) -> None:
        """groups: the ranks along each axis that divides some parameter."""
        self.parameters = tuple(parameters)
        self.groups = groups
        self.unreduced = ""
        """Why gradients are not what they will be, or ''."""
        self.owed: tuple[nn.Parameter, ...] = ()
        """Whole parameters of whose gradients each rank along tp has a summand."""
        self._placed: list[nn.Parameter] = []
        self._known: dict[tuple[int, float], tuple[int, Tensor]] = {}

    def mark_parameters(self, with_shards: bool = True) -> None:
        """with_shards: those that fully_shard keeps too, which it may not need before the next forward."""
        owed = {id(parameter) for parameter in self.owed}
        kinds = (nn.Parameter, DTensor) if with_shards else (nn.Parameter,)
        for parameter, axes in self.parameters:
            if (axes - {"dp"} or id(parameter) in owed) and type(parameter) in kinds:
                _mark(parameter, Note(weakref.ref(self), axes, "parameter"))

    def unmark_parameters(self) -> None:
        for parameter, _ in self.parameters:
            if isinstance(parameter, MARKED):
                unmark(parameter)

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
                _mark(gradient, Note(weakref.ref(self), axes))

    def unmark(self) -> None:
        self._known.clear()
        for parameter, _ in self.parameters:
            if isinstance(parameter.grad, MARKED):
                unmark(parameter.grad)
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
            own, axes = torch.stack([part.double() for part in parts]), [axes for _, axes in gradients]
            if math.isinf(order):
                whole = self._reduced(own, axes, dist.ReduceOp.MAX)
            else:
                whole = self._reduced(own.detach().pow(order), axes, dist.ReduceOp.SUM).pow(1 / order)
                slope = (own.detach() / whole).nan_to_num().pow(order - 1)  # of the whole norm by this part's
                whole = _with_gradient(whole, slope * own)
            return [norm.to(dtype).as_subclass(Whole) for norm, dtype in zip(whole, dtypes, strict=True)]

    def total(self, part: Tensor, axes: Axes, operation: Any) -> Tensor:
        """One number of this rank, over all ranks that hold other parts."""
        with DisableTorchFunction():
            together = part.reshape(1).to(torch.int64 if part.dtype == torch.bool else part.dtype)
            return self._reduced(together, [axes], operation)[0].to(part.dtype).as_subclass(Whole)

    def count(self, part: Tensor, axes: Axes) -> int:
        """Elements of the whole: tp and ep cut evenly, and a DTensor knows its own number. No rank waits for another."""
        with DisableTorchFunction():
            own = part.numel()
        return own * math.prod(self.groups[axis].size() for axis in axes if axis in ("tp", "ep"))

    def _reduced(self, own: Tensor, axes: list[Axes], operation: Any) -> Tensor:
        """Over the ranks that hold other parts. Where it is part of a loss, a rank's own part gets its own gradient."""
        together = own.detach().clone()
        for axis, group in self.groups.items():
            places = [place for place, divided in enumerate(axes) if axis in divided]
            if places:
                chosen = together[places]
                with along(axis):
                    dist.all_reduce(chosen, op=operation, group=group)
                together[places] = chosen
        if own.requires_grad and operation != dist.ReduceOp.SUM:
            raise PlanError(
                "the largest or smallest element of parameters that ranks hold parts of is no part of a loss: only one rank has "
                "it. Ask for it under torch.no_grad(), or of parameter.detach()"
            )
        return _with_gradient(together, own)


def _with_gradient(value: Tensor, source: Tensor) -> Tensor:
    """A value that is known, with the gradient of another tensor, if it has one."""
    return value + (source - source.detach()) if source.requires_grad else value


def _is_part(gradient: Tensor, is_known: Any) -> bool:
    """A DTensor is one always: its norm is to be a plain number, as that of the others."""
    return type(gradient) is DTensor or (type(gradient) is Tensor and bool(is_known))


def local_version(gradient: Tensor) -> int:
    with DisableTorchFunction():
        return int(local(gradient)._version)


CLASSES: dict[type[Tensor], type[Tensor]] = {Tensor: Part, nn.Parameter: PartOfParameter, DTensor: ShardedPart}
PLAIN = {marked: plain for plain, marked in CLASSES.items()}


def _mark(tensor: Tensor, note: Note) -> Tensor:
    vars(tensor)[NOTE] = note
    tensor.__class__ = CLASSES[type(tensor)]
    return tensor


def unmark(tensor: Tensor) -> Note:
    """As torch made it."""
    tensor.__class__ = PLAIN[type(tensor)]
    note: Note = vars(tensor).pop(NOTE)
    return note


def _answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = _name(function)
    marked = [value for value in _flat(args, kwargs) if isinstance(value, MARKED)]
    marked = list({id(value): value for value in marked}.values())
    notes: list[Note] = [vars(value)[NOTE] for value in marked]
    home, axes, what = notes[0].home(), notes[0].axes, notes[0].what
    if home is None:
        return _run_on_parts(function, args, kwargs, marked)
    reads = name in NORMS or name in TOTALS or name in REFUSED or name in (FOREACH_NORM, "mean") or "clamp" in name
    if reads and home.unreduced and what == "gradient":
        raise PlanError(f"'{name}' of a gradient: {home.unreduced}")
    if what == "parameter" and not axes:
        return _of_owed(home, function, args, kwargs, marked)
    if name in REFUSED:
        raise PlanError(
            f"'{name}' of {what}s that lie over {', '.join(sorted(axes))}: each rank has its part, and the answer would be "
            f"another on each; use norms, sums or mw.clip_grad_norm_, or gather the {what}s first"
        )
    if name in COUNTS:
        return home.count(marked[0], axes)
    if name == FOREACH_NORM:
        return _foreach_norm(home, *args, **kwargs)
    if name in NORMS:
        order = _order(name, marked[0], args, kwargs)
        return home.norm(marked[0], axes, order) if what == "gradient" else home.norms([(marked[0], axes)], order)[0]
    if name in TOTALS or name == "mean":
        return _total(home, name, args, kwargs, notes[0])
    made = _run_on_parts(function, args, kwargs, marked)
    is_new = type(made) in (Tensor, DTensor) and all(made is not value for value in marked)
    if is_new and made.requires_grad and name not in ELEMENTWISE:
        raise PlanError(
            f"'{name}' of a parameter outside of the model's forward: it lies over {', '.join(sorted(axes))}, and this rank has "
            "its part only; compute this inside the forward, or under torch.no_grad() of the parameters you gathered"
        )
    return _mark(made, notes[0]) if name in ELEMENTWISE and is_new else made


def _of_owed(
    home: Parts, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], marked: Sequence[Tensor]
) -> Any:
    """Of a parameter that is whole here. In a loss each rank along tp counts for its share: they are added up."""
    made = _run_on_parts(function, args, kwargs, marked)
    if not isinstance(made, Tensor) or made.grad_fn is None or any(made is value for value in marked):
        return made
    size = home.groups["tp"].size()
    shares = {id(value): _run_on_parts(_Share.apply, (value, size), {}, [value]) for value in marked}
    leaves, structure = tree_flatten((args, kwargs))
    shared_args, shared_kwargs = tree_unflatten([shares.get(id(leaf), leaf) for leaf in leaves], structure)
    return function(*shared_args, **shared_kwargs)


class _Share(torch.autograd.Function):
    """A tensor as it is; its gradient is divided by a number of ranks."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, size: int) -> Tensor:
        context.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / context.size, None


def _run_on_parts(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], marked: Sequence[Tensor]
) -> Any:
    """The function itself, on tensors as torch made them. A number that is the same on all ranks meets parts in place, since a
    DTensor takes no plain tensor beside it."""
    notes = [unmark(value) for value in marked]
    try:
        if any(isinstance(value, Whole) for value in _flat(args, kwargs)):
            with DisableTorchFunctionSubclass():
                made = function(*map(_as_part, args), **{key: _as_part(value) for key, value in kwargs.items()})
            return args[0] if _changes_in_place(function) else made
        return function(*args, **kwargs)
    finally:
        for value, note in zip(marked, notes, strict=True):
            _mark(value, note)


def _as_part(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_as_part, value))
    return local(value) if isinstance(value, DTensor) else value


def _changes_in_place(function: Callable[..., Any]) -> bool:
    name = _name(function)
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _total(home: Parts, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Tensor:
    gradient, what, axes = args[0] if args else kwargs.get("input"), note.what, note.axes
    if len(args) > 1 or {"dim", "axis", "other"} & set(kwargs) or not isinstance(gradient, MARKED):
        raise PlanError(
            f"'{name}' along a dim of a {what} that lies over {', '.join(sorted(axes))}: each rank has its part; reduce the "
            f"whole {what}, or gather it first"
        )
    if name == "mean":
        return _total(home, "sum", args, kwargs, note) / home.count(gradient, axes)
    with DisableTorchFunction():
        part = getattr(local(gradient), name)(**{key: value for key, value in kwargs.items() if key != "input"})
    return home.total(part, axes, TOTALS[name])


def _foreach_norm(home: Parts, tensors: Sequence[Tensor], ord: float = 2.0, dtype: Any = None) -> list[Tensor]:
    pairs = [(tensor, vars(tensor)[NOTE].axes if isinstance(tensor, MARKED) else frozenset()) for tensor in tensors]
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
