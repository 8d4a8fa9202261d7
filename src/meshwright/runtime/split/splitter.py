"""The Splitter: while it is active, each torch function that meets a split tensor follows its rule (runtime/split/rules/table.py).

It sits above autograd, as a torch function mode: rules call ordinary functions on this rank's parts, and autograd finds the
gradients of those. What must pass between ranks, passes in the moves of runtime/split/exchange.py, and nowhere else. The
model sees the sizes of whole tensors. A function without a rule that meets a split tensor is refused, by name.

Under sequence parallel a sum over tp is made in parts: each rank gets its tokens of it, and whoever works along the tokens or
reads the tensor with a split weight gathers them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.axes import Axis
from meshwright.core.errors import PlanError
from meshwright.core.plan import ContextWay
from meshwright.runtime._torch import _are_functorch_transforms_active, tree_leaves, unwrapped
from meshwright.runtime.split import exchange, functions
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import (
    NOTE,
    Addend,
    Cut,
    cuts,
    lay,
    layout_of,
    moved,
    storage_key,
    whole_shape,
)
from meshwright.runtime.split.rules.arguments import Args, Options, spelled
from meshwright.runtime.split.saved import gathered_again, was_gathered
from meshwright.runtime.uncompiled import uncompiled

STREAM_DIMS = 3
"""Samples, tokens, features: only such tensors are laid over tp by their tokens."""

Rule = Callable[["Splitter", Any, Args, Options], Any]
"""(splitter, function, its arguments, its options) → what the function gives, with a layout."""


class NotSplit(PlanError):  # noqa: N818 - raised at a rule, caught where shardings are tried
    """A function cannot run on parts. runs: it could, if the dim were cut in that many runs."""

    def __init__(self, words: str, runs: int = 1) -> None:
        super().__init__(words)
        self.words, self.runs = words, runs
        self.block: str | None = None
        self.reached = 0
        """Functions that ran before, in a trial."""

    def __str__(self) -> str:
        where = f"block '{self.block}'" if self.block else "the model"
        fused = (
            f"; a fused projection is cut in runs: set runs = {self.runs} for its tensors in the plan's sharding, or make the plan "
            "in the process that captures the model"
        )
        return f"{where} cannot be split: {self.words}{fused if self.runs > 1 else ''}"


class Indivisible(NotSplit):
    """A size that the degree does not divide."""

    def __init__(self, words: str, size: int) -> None:
        super().__init__(words)
        self.size = size


_active = threading.local()


class Splitter(TorchFunctionMode):
    """`axes`: those with more than one rank along which the model itself is split."""

    def __init__(self, axes: Iterable[Ranks], sequence_parallel: bool = False, context: ContextWay = "heads") -> None:
        super().__init__()
        self.axes: dict[Axis, Ranks] = {ranks.axis: ranks for ranks in axes}
        self.degrees = {axis: ranks.size for axis, ranks in self.axes.items()}
        self.sequence_parallel = sequence_parallel
        self.context = context
        self.names: dict[int, str] = {}
        """Parameters by identity, as borders meet them."""
        self.owed: dict[str, None] = {}
        """Whole parameters whose gradient is a summand along tp, by name, in the order they were met."""
        self.batch: set[int] = set()
        """Storages of the batch: ids that lie there are tokens."""
        self.samples = 1
        """Of the batch: tokens in a row are that many runs."""
        self.statistics: dict[int, tuple[Tensor, Axis, Cut]] = {}
        """Buffers of batch norms of which this rank follows its own channels, by identity, with where those lie."""
        self.shared: dict[tuple[int, int, Axis], tuple[Tensor, Tensor]] = {}
        """What was made of tensors, with the tensor, until the block ends (runtime/split/border.py)."""
        self.uncompiled: list[AbstractContextManager[None]] = []
        """One for each time that it is active: parts of the model that are compiled run as they are written."""
        self.reading = ""
        """The user's function whose forward runs now: it was given whole tensors, and may read no others."""

    # ------------------------------------------------------------ as a mode

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from meshwright.runtime.split.aliases import follow
        from meshwright.runtime.split.rules.table import ALWAYS, rule_of

        kwargs = kwargs or {}
        if _are_functorch_transforms_active():
            self._check_transform(function, args, kwargs)
        touches = _touches(args, kwargs)
        if touches and self.reading:
            raise NotSplit(
                f"{self.reading} reads a tensor that lies over ranks and is no argument of it: pass it as one"
            )
        if not touches and function not in ALWAYS:
            made = function(*args, **kwargs)
        else:
            args, kwargs = spelled(function, args, kwargs)
            made = rule_of(function, args, kwargs)(self, function, args, kwargs)
        follow(function, args, kwargs, made)
        return made

    def _check_transform(self, function: Any, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(layout_of(unwrapped(tensor)) for tensor in tensors):
            name = getattr(function, "__name__", function)
            raise NotSplit(
                f"'{name}' is called inside a torch.func transform (vmap, grad, …) on a tensor that lies over ranks: write a loop, "
                "or torch.autograd.grad, in its place"
            )

    def __enter__(self) -> Any:
        _active.splitter = self
        functions.begin_watching()
        self.uncompiled.append(uncompiled())
        self.uncompiled[-1].__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *details: Any) -> Any:
        _active.splitter = None
        functions.end_watching()
        self.uncompiled.pop().__exit__(None, None, None)
        return super().__exit__(*details)  # type: ignore[no-untyped-call]

    @property
    def is_active(self) -> bool:
        """On this thread."""
        return getattr(_active, "splitter", None) is self

    # ------------------------------------------------------------ tensors

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Of the whole tensor."""
        layout = layout_of(tensor)
        return whole_shape(tuple(tensor.shape), layout, self.axes) if layout else tuple(tensor.shape)

    def summed(self, tensor: Tensor) -> Tensor:
        """The tensor without addends: summed up, by tokens where sequences are parallel."""
        layout = layout_of(tensor)
        for axis, share in (layout or {}).items():
            if isinstance(share, Addend):
                tensor = self._sum(tensor, axis, share)
        return tensor

    def totalled(self, tensor: Tensor) -> Tensor:
        """The tensor without addends, as large as it was."""
        for axis, share in (layout_of(tensor) or {}).items():
            if isinstance(share, Addend):
                tensor = self._sum(tensor, axis, share, by_tokens=False)
        return tensor

    def _sum(self, tensor: Tensor, axis: Axis, share: Addend, by_tokens: bool = True) -> Tensor:
        layout = layout_of(tensor) or {}
        ranks = self.axes[axis]
        cut = None
        along_last = share.bias is None or share.bias.dim() <= 1
        if by_tokens and axis == "tp" and self.sequence_parallel and tensor.dim() == STREAM_DIMS and along_last:
            cut = self.fitting(tensor, "tp", Cut(tensor.dim() - 2), "tokens")
            made = exchange.scatter(tensor, ranks, cut)
        else:
            made = exchange.total(tensor, ranks)
        made = lay(made, moved(layout, axis, cut))
        if share.bias is None:
            return made
        bias = share.bias
        for other in cuts(layout_of(made)):
            bias = self.lend(bias, other)
        return lay(made + bias, layout_of(made))

    def lend(self, whole: Tensor, axis: Axis) -> Tensor:
        """A tensor that is whole along the axis, read by work on parts: its gradient will be a summand."""
        ranks = self.axes[axis]
        if not whole.requires_grad or exchange.sums_gradients(ranks) or was_gathered(whole):
            return whole
        if isinstance(whole, nn.Parameter):
            self.owed[self.names.get(id(whole), "")] = None
            return whole
        return self.once(whole, axis, lambda: lay(exchange.enter(whole, ranks), layout_of(whole)))

    def once(self, tensor: Tensor, axis: Axis, make: Callable[[], Tensor]) -> Tensor:
        """What is made of a tensor for all in a block that read it: backward then adds up their gradients in one call.

        A tensor that was changed in place since is another one."""
        key = (id(tensor), 0 if tensor.is_inference() else tensor._version, axis)
        if key not in self.shared:
            self.shared[key] = (tensor, make())
        return self.shared[key][1]

    def gather(self, tensor: Tensor, axis: Axis, *, read_by_parts: bool = False) -> Tensor:
        """Whole along an axis it is cut along."""
        layout = layout_of(tensor) or {}
        cut = layout[axis]
        assert isinstance(cut, Cut)
        tensor = self._uncover(tensor, axis)
        layout = layout_of(tensor) or {}
        if read_by_parts and axis == "tp":
            whole = moved(layout, axis, None)
            return self.once(tensor, axis, lambda: lay(gathered_again(tensor, self.axes[axis], cut), whole))
        made = exchange.gather(tensor, self.axes[axis], cut, read_by_parts=read_by_parts)
        return lay(made, moved(layout, axis, None))

    def _uncover(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Axes that cut the same dim after this one must be undone first."""
        layout = layout_of(tensor) or {}
        cut = layout[axis]
        assert isinstance(cut, Cut)
        order = list(layout)
        for later in reversed(order[order.index(axis) + 1 :]):
            share = layout[later]
            if isinstance(share, Cut) and share.dim == cut.dim:
                tensor = self.gather(tensor, later)
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """Whole along every axis."""
        tensor = self.summed(tensor)
        return self.gather_dims(tensor, range(tensor.dim()))

    def gather_dims(self, tensor: Tensor, dims: Iterable[int]) -> Tensor:
        """Whole along these dims."""
        wanted = set(dims)
        for axis, cut in reversed(list(cuts(layout_of(tensor)).items())):
            if cut.dim in wanted:
                tensor = self.gather(tensor, axis)
        return tensor

    def narrow(self, whole: Tensor, axis: Axis, cut: Cut) -> Tensor:
        """This rank's part of a tensor that is whole along the axis."""
        cut = self.fitting(whole, axis, cut)
        layout = layout_of(whole) or {}
        made = exchange.narrow(whole, self.axes[axis], cut)
        return lay(made, moved(layout, axis, cut))

    def swap(self, tensor: Tensor, axis: Axis, then: Cut) -> Tensor:
        """Cut along another dim."""
        layout = layout_of(tensor) or {}
        now = layout[axis]
        assert isinstance(now, Cut)
        if now[:2] == then[:2]:
            return tensor
        if now.dim == then.dim:
            words = f"dim {now.dim}, which lies over {axis} in {now.runs} runs, meets one in {then.runs}"
            self.allow_gathering(axis, NotSplit(words, runs=max(now.runs, then.runs)))
            return self.narrow(self.gather(tensor, axis), axis, then)
        tensor = self._uncover(tensor, axis)
        then = self.fitting(tensor, axis, then)
        layout = layout_of(tensor) or {}
        made = exchange.swap(tensor, self.axes[axis], now, then)
        return lay(made, moved(layout, axis, then))

    @property
    def is_trial(self) -> bool:
        """Whether shardings of weights are tried, with pretended ranks (runtime/split/legal.py)."""
        return list(self.axes) == ["tp"] and self.axes["tp"].group is None and not self.sequence_parallel

    def allow_gathering(self, axis: Axis, otherwise: NotSplit) -> None:
        """What lies over the axis is to be gathered for a function. In a trial that is refused: weights stay whole instead."""
        if self.is_trial:
            raise otherwise

    def fitting(self, tensor: Tensor, axis: Axis, cut: Cut, words: str = "") -> Cut:
        """The cut of a dim that is whole along the axis, with the rest of its size. Parts of different sizes are cut no further."""
        size, ranks = tensor.shape[cut.dim] // cut.runs, self.axes[axis]
        words = words or f"dim {cut.dim} of size {self.shape(tensor)[cut.dim]}"
        others = [other for other in cuts(layout_of(tensor)).values() if other.dim == cut.dim]
        if any(other.rest for other in others):
            raise Indivisible(f"{words}, of which ranks have different numbers, is to be cut along {axis} too", size)
        if not self.divides(size, axis, others):
            self.divide(size, axis, words)
        return cut._replace(rest=size % ranks.size)

    def divides(self, size: int, axis: Axis, others: Iterable[Cut] = ()) -> bool:
        """Whether a dim of that size can be cut along the axis: in equal parts, or, where those may differ, in one each at least.

        others: along other axes, which cut the same dim."""
        ranks = self.axes[axis]
        return size % ranks.num_pieces == 0 or (ranks.may_differ and size > ranks.size and not list(others))

    def divide(self, size: int, axis: Axis, words: str) -> int:
        """size / degree; refused where it does not divide."""
        degree, num_pieces = self.degrees[axis], self.axes[axis].num_pieces
        if size % num_pieces:
            twice = ", two pieces each" if num_pieces > degree else ""
            raise Indivisible(f"{words}: {size} does not divide over {axis}={degree}{twice}", size)
        return size // degree

    def read(self, batch: Any) -> None:
        """What the next forward is given: ids that lie there are tokens."""
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self.batch = {storage_key(tensor) for tensor in tensors}
        self.samples = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)

    def is_of_batch(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self.batch


def name_of(function: Any) -> str:
    """Of an attribute, its own name: torch asks for it through `__get__`."""
    name = getattr(function, "__name__", str(function))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else str(name)


def _touches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a split tensor is among the arguments, at their top or in a list of them."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if NOTE in vars(value):
                return True
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, Tensor) and NOTE in vars(item):
                    return True
    return False
