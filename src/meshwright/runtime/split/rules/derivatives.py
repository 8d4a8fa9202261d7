"""Gradients that a forward asks for itself: hooks on tensors, and `torch.autograd.grad`.

Both are written for the gradient of a whole tensor, and get it. Where the tensor is cut, so is its gradient, and a hook is given
the gathered one. Along cp the gradient of a whole tensor is a summand (runtime/split/exchange.py): it is added up before a hook
sees it, and of what the hooks return on all ranks the first rank's counts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.runtime.own_backward import place_of
from meshwright.runtime.split import exchange
from meshwright.runtime.split.functions import OWN
from meshwright.runtime.split.layout import NOTE, Addend, Layout, cuts, lay, layout_of
from meshwright.runtime.split.rules.arguments import Args, Options
from meshwright.runtime.split.splitter import NotSplit, Splitter

Hook = Callable[[Tensor], Tensor | None]


def register_hook(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    if str(getattr(hook, "__module__", "")).startswith(
        OWN
    ):  # `fully_shard` has one on what a block hands on, and reads no gradient
        return function(*args, **kwargs)
    if isinstance(tensor, nn.Parameter):
        name = split.names.get(id(tensor), "a parameter")
        raise NotSplit(
            f"{place_of(hook)} is registered on '{name}' in the forward: change the gradient before the update"
        )
    if any(isinstance(share, Addend) for share in (layout_of(tensor) or {}).values()):
        _become_whole(split, tensor)
    return function(tensor, _on_whole(split, dict(layout_of(tensor) or {}), hook))


def _become_whole(split: Splitter, summand: Tensor) -> None:
    """The tensor that the model holds becomes the sum: a pending bias is behind the hook then, as in one process."""
    whole = split.whole(summand)
    summand.copy_(whole)
    vars(summand).pop(NOTE, None)


def _on_whole(split: Splitter, layout: Layout, hook: Hook) -> Hook:
    """The hook, given the gradient of the whole tensor at the scale of one process."""
    axes = list(cuts(layout).items())
    summed = [ranks for axis, ranks in split.axes.items() if axis not in layout and exchange.sums_gradients(ranks)]
    scale = prod(map(exchange.gradient_scale, split.axes.values()))
    if not axes and scale == 1:
        return hook

    def run(gradient: Tensor) -> Tensor | None:
        for axis, cut in reversed(axes):
            gradient = split.axes[axis].gather(gradient, cut)
        for ranks in summed:
            gradient = ranks.add_up(gradient)
        made = hook(gradient / scale)
        if made is None:
            return None
        made = made * scale if all(ranks.rank == 0 for ranks in summed) else torch.zeros_like(made)
        for axis, cut in axes:
            made = split.axes[axis].own_part(made, cut)
        return made

    return run


class NodeOverRanks:
    """In the place of the node that made a tensor's part: it is there, and nothing else can be said of it. Its own gradients are
    those of a part, and its inputs others than those of the node that one process has."""

    def __getattr__(self, name: str) -> Any:
        raise NotSplit(
            f"'grad_fn.{name}' of a tensor that lies over ranks: its node sees gradients of a part; use Tensor.register_hook"
        )


def node(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """`grad_fn`, which hooks can be put on. Along cp the gradient of a whole tensor is a summand too."""
    found = function(*args, **kwargs)
    is_whole = not layout_of(args[0]) and not any(map(exchange.sums_gradients, split.axes.values()))
    return found if found is None or is_whole else NodeOverRanks()


def gradients(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """`torch.autograd.grad`: of whole outputs, with respect to tensors as they lie."""
    outputs, inputs, slopes, *rest = (*args, None, None, None)[: max(3, len(args))]
    outputs, inputs = kwargs.pop("outputs", outputs), kwargs.pop("inputs", inputs)
    slopes = kwargs.pop("grad_outputs", slopes)
    if not _is_plain(outputs) or not _is_plain(inputs):
        raise NotSplit("'torch.autograd.grad' of anything but tensors: give tensors, or a list of them")
    asked = _listed(inputs)
    for tensor in asked:
        _check_input(split, tensor)
    whole = [_counted_once(split, split.whole(tensor)) for tensor in _listed(outputs)]
    given = None if slopes is None else [None if one is None else split.whole(one) for one in _listed(slopes)]
    made = function(whole, asked, given, *rest, **kwargs)
    return tuple(_laid(split, gradient, tensor) for gradient, tensor in zip(made, asked, strict=True))


def _is_plain(value: Any) -> bool:
    return all(isinstance(item, Tensor) for item in _listed(value))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_input(split: Splitter, tensor: Tensor) -> None:
    """A whole parameter that parts read has a summand for its gradient until the step ends."""
    if isinstance(tensor, nn.Parameter) and layout_of(tensor) is None and "tp" in split.axes:
        name = split.names.get(id(tensor), "a parameter")
        raise NotSplit(f"'torch.autograd.grad' with respect to '{name}', which is whole under tp: leave out tp")


def _counted_once(split: Splitter, tensor: Tensor) -> Tensor:
    for ranks in split.axes.values():
        tensor = exchange.counted_once(tensor, ranks)
    return tensor


def _laid(split: Splitter, gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """The gradient of a cut tensor is cut alike; that of another is made whole."""
    if gradient is None:
        return None
    layout = layout_of(tensor) or {}
    for axis, ranks in split.axes.items():
        if axis not in layout and exchange.sums_gradients(ranks):
            gradient = exchange.total(gradient, ranks)
    return lay(gradient, dict(cuts(layout)))
