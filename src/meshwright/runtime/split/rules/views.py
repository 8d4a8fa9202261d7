"""Rules for functions that only look at a tensor otherwise: where its cuts are afterwards.

A reshape keeps the order of the elements. Dims before and after it fall into groups with equal products; in a group

    (a, b, …) → (c, d, …)    a cut of b in runs r   →   a cut of d in runs  a · r / c   where that is a whole number

so that heads · width cut by heads stays cut by heads, and tokens of several samples in a row are cut in one run a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.runtime.split.layout import Addend, Cut, Layout, cuts, lay, layout_of, part_size
from meshwright.runtime.split.rules.arguments import Args, Options
from meshwright.runtime.split.rules.whole import without_rule
from meshwright.runtime.split.splitter import NotSplit, Splitter

Sizes = tuple[int, ...]


def sizes_of(args: tuple[Any, ...]) -> Sizes:
    """Sizes or dims given one by one or as one sequence."""
    found = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    return tuple(int(size) for size in found)


# ---------------------------------------------------------------- reshape


def reshaped(split: Splitter, tensor: Tensor, sizes: Sizes) -> Tensor:
    """The tensor in other sizes, which are those of the whole; one may be -1."""
    old = split.shape(tensor)
    new = _complete(old, sizes)
    tensor = _with_bias(split, tensor, keeps_last=bool(new) and new[-1:] == old[-1:])
    layout: Layout = {}
    before, after = list(old), list(new)
    for axis, share in (layout_of(tensor) or {}).items():
        if isinstance(share, Addend):
            layout[axis] = share
            continue
        try:
            then = recut(split, axis, share, tuple(before), tuple(after))
        except NotSplit as error:
            split.allow_gathering(axis, error)
            return reshaped(split, split.gather(tensor, axis), sizes)
        layout[axis] = then
        before[share.dim] = part_size(before[share.dim], share, split.axes[axis])  # the next axis cuts the parts
        after[then.dim] = part_size(after[then.dim], then, split.axes[axis])
    return lay(tensor.reshape(after), layout)


def _with_bias(split: Splitter, tensor: Tensor, keeps_last: bool) -> Tensor:
    """A bias that is still to be added must broadcast as before: one along the last dim, where that stays the last."""
    found = [s.bias for s in (layout_of(tensor) or {}).values() if isinstance(s, Addend) and s.bias is not None]
    return split.summed(tensor) if any(bias.dim() > 1 or not keeps_last for bias in found) else tensor


def _complete(old: Sizes, sizes: Sizes) -> Sizes:
    if -1 not in sizes:
        return sizes
    rest = prod(size for size in sizes if size != -1)
    return tuple(prod(old) // rest if size == -1 else size for size in sizes)


def recut(split: Splitter, axis: Axis, cut: Cut, old: Sizes, new: Sizes) -> Cut:
    """Where a cut of the old dims is in the new ones."""
    for before, after in _groups(old, new):
        if cut.dim not in before:
            continue
        outer, size = prod(old[before.start : cut.dim]) * cut.runs, old[cut.dim] // cut.runs
        for dim in reversed(after):
            ahead = prod(new[after.start : dim])
            runs, rest = divmod(outer, ahead)
            if rest == 0 and runs and new[dim] % runs == 0 and new[dim] // runs > 1:
                words = f"reshape of {list(old)} to {list(new)}"
                if new[dim] // runs == size:
                    return cut._replace(dim=dim, runs=runs)
                if cut.rest:
                    continue  # parts of different sizes are parts of no other dim
                if _is_stack(new, range(dim, after.stop), split.degrees[axis]):
                    raise NotSplit(f"{words} stacks {new[dim]} tensors", runs=cut.runs * new[dim] // runs)
                split.divide(new[dim] // runs, axis, words)
                return Cut(dim, runs)
    raise NotSplit(f"reshape of {list(old)} to {list(new)} mixes dim {cut.dim}, which lies over {axis}")


def _is_stack(sizes: Sizes, dims: range, degree: int) -> bool:
    """Queries, keys and values in one: (3, heads, width), where the heads divide and the 3 does not."""
    return len(dims) > 2 and sizes[dims[0]] % degree > 0 and sizes[dims[1]] % degree == 0


def _groups(old: Sizes, new: Sizes) -> Iterator[tuple[range, range]]:
    """Dims before and after that hold the same elements."""
    i = j = 0
    while i < len(old) or j < len(new):
        first, other = i, j
        have = want = 1
        if i < len(old):
            have, i = old[i], i + 1
        if j < len(new):
            want, j = new[j], j + 1
        while have != want:
            if have < want:
                have, i = have * old[i], i + 1
            else:
                want, j = want * new[j], j + 1
        yield range(first, i), range(other, j)


def reshape(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, *sizes = args
    if kwargs:
        sizes = [kwargs.get("shape", kwargs.get("size"))]
    if sizes and not isinstance(sizes[0], int | list | tuple):
        return without_rule(split, function, args, kwargs)  # view(dtype)
    return reshaped(split, tensor, sizes_of(tuple(sizes)))


def reshape_as(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    return reshaped(split, args[0], split.shape(args[1]))


def flatten(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor = args[0]
    first, last = (*args[1:], *[None, None])[:2]
    first, last = kwargs.get("start_dim", first), kwargs.get("end_dim", last)
    old = split.shape(tensor)
    start, end = (first or 0) % len(old), (-1 if last is None else last) % len(old)
    return reshaped(split, tensor, (*old[:start], prod(old[start : end + 1]), *old[end + 1 :]))


def unflatten(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, dim, sizes = args[0], *(_named(args, kwargs, ("dim", "sizes")))
    old = split.shape(tensor)
    dim %= len(old)
    inner = _complete((old[dim],), tuple(sizes))
    return reshaped(split, tensor, (*old[:dim], *inner, *old[dim + 1 :]))


def _named(args: Args, kwargs: Options, names: tuple[str, ...]) -> list[Any]:
    """Arguments after the tensor, by place or by name."""
    return [args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names, start=1)]


# ---------------------------------------------------------------- dims in another order


def permuted(split: Splitter, tensor: Tensor, order: list[int]) -> Tensor:
    """order: for every new dim, the old one."""
    tensor = _with_bias(split, tensor, keeps_last=order[-1:] == [len(order) - 1])
    layout = layout_of(tensor) or {}
    new: Layout = {
        axis: share.at(order.index(share.dim)) if isinstance(share, Cut) else share for axis, share in layout.items()
    }
    return lay(tensor.permute(order), new)


def transpose(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    names = ("dim0", "dim1") if "dim0" in kwargs else ("axis0", "axis1")
    one, other = (dim % args[0].dim() for dim in _named(args, kwargs, names))
    order = list(range(args[0].dim()))
    order[one], order[other] = order[other], order[one]
    return permuted(split, args[0], order)


def permute(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    dims = sizes_of(args[1:]) if len(args) > 1 else sizes_of((kwargs["dims"],))
    return permuted(split, args[0], [dim % args[0].dim() for dim in dims])


def movedim(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    source, target = _named(args, kwargs, ("source", "destination"))
    num = args[0].dim()
    sources = [dim % num for dim in ([source] if isinstance(source, int) else source)]
    targets = [dim % num for dim in ([target] if isinstance(target, int) else target)]
    placed = dict(zip(targets, sources, strict=True))
    rest = iter(dim for dim in range(num) if dim not in sources)
    return permuted(split, args[0], [placed[dim] if dim in placed else next(rest) for dim in range(num)])


def adjoint(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """`.H`, `.mH`, `.adjoint()`"""
    turned = turn_last_two(split, function, args, kwargs)
    return lay(turned.conj(), layout_of(turned))


def turn_last_two(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """`.mT`, `.t()`, and `.T`, which turns all dims round"""
    order = list(range(args[0].dim()))
    turns_all = getattr(function, "__self__", None) is Tensor.T
    order = order[::-1] if turns_all else [*order[:-2], *reversed(order[-2:])]
    return permuted(split, args[0], order)


# ---------------------------------------------------------------- dims more, fewer, repeated


def shifted(layout: Layout | None, place: int, by: int) -> Layout:
    """Cuts from a dim on, so many dims further."""
    return {
        axis: share.at(share.dim + by) if isinstance(share, Cut) and share.dim >= place else share
        for axis, share in (layout or {}).items()
    }


def as_complex(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """view_as_complex: the last dim, of two, is gone."""
    tensor = split.summed(args[0])
    tensor = split.gather_dims(tensor, [tensor.dim() - 1])
    return lay(function(tensor.contiguous()), layout_of(tensor))


def unsqueeze(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    (dim,) = _named(args, kwargs, ("dim",))
    dim %= args[0].dim() + 1
    tensor = _with_bias(split, args[0], keeps_last=dim < args[0].dim())
    return lay(tensor.unsqueeze(dim), shifted(layout_of(tensor), dim, 1))


def squeeze(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor = split.summed(args[0])
    old = split.shape(tensor)
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = range(len(old)) if given is None else [given] if isinstance(given, int) else given
    gone = {dim % len(old) for dim in dims if old[dim] == 1}
    return reshaped(split, tensor, tuple(size for dim, size in enumerate(old) if dim not in gone))


def expand(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    return _expanded(split, args[0], sizes_of(args[1:]) if len(args) > 1 else sizes_of((kwargs["size"],)))


def expand_as(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    return _expanded(split, args[0], split.shape(args[1]))


def _expanded(split: Splitter, tensor: Tensor, sizes: Sizes) -> Tensor:
    tensor = split.summed(tensor)
    more = len(sizes) - tensor.dim()
    layout = shifted(layout_of(tensor), 0, more)
    cut_dims = {cut.dim for cut in cuts(layout).values()}
    local = [tensor.shape[dim - more] if dim in cut_dims else size for dim, size in enumerate(sizes)]
    return lay(tensor.expand(local), layout)


def repeat(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, times = split.summed(args[0]), sizes_of(args[1:] if len(args) > 1 else (kwargs["repeats"],))
    more = len(times) - tensor.dim()
    layout = shifted(layout_of(tensor), 0, more)
    tensor = split.gather_dims(tensor, [c.dim - more for c in cuts(layout).values() if times[c.dim] != 1])
    return lay(tensor.repeat(*times), shifted(layout_of(tensor), 0, more))


def repeat_interleave(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor = split.summed(args[0])
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is None or not isinstance(args[1] if len(args) > 1 else kwargs["repeats"], int):
        return without_rule(split, function, args, kwargs)
    uneven = [cut.dim for cut in cuts(layout_of(tensor)).values() if cut.rest]
    tensor = split.gather_dims(tensor, [dim % tensor.dim()] if dim % tensor.dim() in uneven else [])
    return lay(function(tensor, *args[1:], **kwargs), layout_of(tensor))
