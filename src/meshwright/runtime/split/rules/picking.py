"""Rules for functions that take pieces of a tensor or put pieces together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.runtime.split.aliases import join
from meshwright.runtime.split.laying import laid
from meshwright.runtime.split.layout import Cut, Layout, cuts, lay, layout_of
from meshwright.runtime.split.rules.arguments import Args, Options, dim_of
from meshwright.runtime.split.rules.pointwise import alike, noted
from meshwright.runtime.split.rules.views import shifted, sizes_of
from meshwright.runtime.split.rules.whole import all_whole, in_place_on_whole, without_rule
from meshwright.runtime.split.splitter import NotSplit, Splitter

# ---------------------------------------------------------------- pieces of equal rank


def chunk(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """chunk and tensor_split: into a number of pieces, or for the latter at places."""
    dim = dim_of(args, kwargs, 2)
    number = (
        args[1] if len(args) > 1 else next((kwargs[name] for name in ("chunks", "sections") if name in kwargs), None)
    )
    if not isinstance(number, int) or split.shape(args[0])[dim] % number:
        return _uneven(split, function, args, kwargs, dim)
    return _pieces(split, args, number, dim)


def split_by_size(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    size = args[1] if len(args) > 1 else kwargs.get("split_size") or kwargs["split_size_or_sections"]
    dim = dim_of(args, kwargs, 2)
    whole = split.shape(args[0])[dim]
    sizes = [size] * (whole // size) if isinstance(size, int) else list(size)
    if sum(sizes) != whole:
        return _uneven(split, function, args, kwargs, dim)
    if len(set(sizes)) > 1:
        return _some_runs(split, function, args, kwargs, dim, sizes)
    return _pieces(split, args, len(sizes), dim)


def _some_runs(split: Splitter, function: Any, args: Args, kwargs: Options, dim: int, sizes: list[int]) -> Any:
    """Pieces that differ in size, each of some runs of the dim: a query, and keys and values in one."""
    tensor = split.summed(args[0])
    whole = split.shape(tensor)[dim]
    along = [(axis, cut) for axis, cut in cuts(layout_of(tensor)).items() if cut.dim == dim]
    if len(along) != 1 or any(size * along[0][1].runs % whole for size in sizes):
        return _uneven(split, function, args, kwargs, dim)
    (axis, cut) = along[0]
    of_run = tensor.shape[dim] // cut.runs
    pieces = tensor.split([size * cut.runs // whole * of_run for size in sizes], dim)
    layout = layout_of(tensor) or {}
    return tuple(
        lay(piece, {**layout, axis: cut._replace(runs=cut.runs * size // whole)})
        for piece, size in zip(pieces, sizes, strict=True)
    )


def _pieces(split: Splitter, args: Args, number: int, dim: int) -> Any:
    """So many equal pieces along a dim. Along a cut one, each piece must be some of its runs."""
    tensor = split.summed(args[0])
    layout = dict(layout_of(tensor) or {})
    for axis, cut in cuts(layout).items():
        if cut.dim != dim:
            continue
        if cut.runs % number:
            words = f"{number} pieces along dim {dim}, which lies over {axis} in {cut.runs} runs"
            split.allow_gathering(axis, NotSplit(words, runs=number))
            return _pieces(split, (split.gather(tensor, axis),), number, dim)
        layout[axis] = cut._replace(runs=cut.runs // number)
    return tuple(lay(piece, dict(layout)) for piece in tensor.chunk(number, dim))


def glu(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """glu(tensor, dim): half of the dim gates the other; both must be runs of it."""
    dim = dim_of(args, kwargs, 1, default=-1)
    one, other = _pieces(split, args, 2, dim)
    return lay(one * other.sigmoid(), layout_of(one))


def _uneven(split: Splitter, function: Any, args: Args, kwargs: Options, dim: int) -> Any:
    tensor = split.gather_dims(split.summed(args[0]), [dim])
    return tuple(lay(piece, layout_of(tensor)) for piece in function(tensor, *args[1:], **kwargs))


def iterate(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    rows = unbind(split, function, args, kwargs)
    join(args[0], rows)
    return iter(rows)


def unbind(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    dim = dim_of(args, kwargs, 1)
    tensor = split.gather_dims(split.summed(args[0]), [dim])
    return tuple(lay(piece, shifted(layout_of(tensor), dim + 1, -1)) for piece in tensor.unbind(dim))


def along_dim(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """Functions that need some dims whole and keep the others: narrow and index_select(tensor, dim, …), flip, roll."""
    dims = _dims_of(getattr(function, "__name__", ""), args, kwargs)
    tensor = split.gather_dims(split.summed(args[0]), [dim % args[0].dim() for dim in dims])
    others, options = all_whole(split, (args[1:], kwargs))
    return lay(function(tensor, *others, **options), layout_of(tensor))


def _dims_of(name: str, args: Args, kwargs: Options) -> list[int]:
    """roll(tensor, shifts, dims) rolls the flattened tensor where no dims are named; flip takes dims one by one too."""
    if name == "roll":
        given = args[2] if len(args) > 2 else kwargs.get("dims", ())
        given = given if isinstance(given, int) or given else range(args[0].dim())
    elif name == "flip":
        given = sizes_of(args[1:]) if len(args) > 1 else kwargs["dims"]
    else:
        given = args[1] if len(args) > 1 else kwargs["dim"]
    return [given] if isinstance(given, int) else list(given)


def pick_along_dim(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """topk, sort: the dim is the last where none is named, and comes after a number for topk."""
    place = 2 if getattr(function, "__name__", "") == "topk" else 1
    dim = dim_of(args, kwargs, place, default=-1)
    tensor = split.gather_dims(split.summed(args[0]), [dim])
    return noted(function(tensor, *args[1:], **kwargs), layout_of(tensor))


def gather_by_index(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """gather(tensor, dim, index): index lies as the tensor does, along all dims but that one."""
    dim = dim_of(args, kwargs, 1)
    tensor = split.gather_dims(split.summed(args[0]), [dim])
    index = split.gather_dims(args[2] if len(args) > 2 else kwargs["index"], [dim])
    for other, (size, wanted) in enumerate(zip(split.shape(tensor), split.shape(index), strict=True)):
        if other != dim and size != wanted:  # fewer are wanted than there are: of the first ranks
            tensor, index = split.gather_dims(tensor, [other]), split.gather_dims(index, [other])
    tensor, index = alike(split, [tensor, index])
    return lay(tensor.gather(dim, index), layout_of(tensor))


def select(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    dim = dim_of(args, kwargs, 1)
    index = args[2] if len(args) > 2 else kwargs["index"]
    tensor = split.gather_dims(split.summed(args[0]), [dim])
    return lay(tensor.select(dim, index), shifted(layout_of(tensor), dim + 1, -1))


# ---------------------------------------------------------------- tensor[…]


def getitem(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, index = split.summed(args[0]), args[1]
    items = _spelled_out(index, tensor.dim())
    if any(isinstance(item, Tensor | list) for item in items):
        return _by_tensors(split, tensor, items)
    if any(isinstance(item, bool) or not (item is None or isinstance(item, slice | int)) for item in items):
        return without_rule(split, function, args, kwargs)
    old = split.shape(tensor)
    partly = [dim for dim, item in _by_dim(items) if not _is_all(item, old[dim])]
    tensor = split.gather_dims(tensor, partly)
    layout = layout_of(tensor)
    local = tuple(
        slice(None)
        if isinstance(item, slice) and item.step in (None, 1) and dim is not None and dim not in partly
        else item
        for dim, item in _with_dims(items)
    )
    return lay(tensor[local], _after(layout, items))


def _spelled_out(index: Any, num_dims: int) -> list[Any]:
    """One item a dim (and the Nones), without `...`."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_num_dims(item) for item in items if item is not None and item is not Ellipsis)
    place = next((n for n, item in enumerate(items) if item is Ellipsis), None)
    rest = [slice(None)] * (num_dims - used)
    return [*items, *rest] if place is None else [*items[:place], *rest, *items[place + 1 :]]


def _num_dims(item: Any) -> int:
    """How many dims one item of an index stands for: a mask stands for as many as it has."""
    return int(item.dim()) if isinstance(item, Tensor) and str(item.dtype) == "torch.bool" else 1


def _with_dims(items: list[Any]) -> list[tuple[int | None, Any]]:
    """Each item with the old dim it takes from."""
    found: list[tuple[int | None, Any]] = []
    dim = 0
    for item in items:
        found.append((None if item is None else dim, item))
        dim += item is not None
    return found


def _by_dim(items: list[Any]) -> list[tuple[int, Any]]:
    return [(dim, item) for dim, item in _with_dims(items) if dim is not None]


def _is_all(item: Any, size: int) -> bool:
    return isinstance(item, slice) and item.indices(size) == (0, size, 1)


def _after(layout: Layout | None, items: list[Any]) -> Layout:
    """Where the cuts are when Nones have added dims and numbers have taken some away."""
    place: dict[int, int] = {}
    new = 0
    for dim, item in _with_dims(items):
        if dim is not None:
            place[dim] = new
        new += item is None or isinstance(item, slice)
    return {
        axis: share.at(place[share.dim]) if isinstance(share, Cut) else share for axis, share in (layout or {}).items()
    }


def _by_tensors(split: Splitter, tensor: Tensor, items: list[Any]) -> Tensor:
    """One tensor of whole numbers picks along one whole dim; anything else is done on the whole tensor."""
    picks = [(dim, item) for dim, item in _by_dim(items) if not _is_all(item, split.shape(tensor)[dim])]
    if len(picks) == 1 and None not in items and isinstance(picks[0][1], Tensor) and not layout_of(picks[0][1]):
        dim, index = picks[0]
        if str(index.dtype) in ("torch.int64", "torch.int32") and index.dim():
            tensor = split.gather_dims(tensor, [dim])
            return lay(tensor[tuple(items)], shifted(layout_of(tensor), dim + 1, index.dim() - 1))
    tensor = split.gather_dims(tensor, range(tensor.dim()))
    whole = [split.whole(item) if isinstance(item, Tensor) else item for item in items]
    found: Tensor = tensor[tuple(whole)]
    return found


def setitem(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """tensor[…] = value. On parts where each cut dim of the tensor is written all along; else on the whole tensor."""
    tensor, index, value = args
    layout = layout_of(tensor) or {}
    items = _spelled_out(index, tensor.dim())
    by_place = all(item is None or isinstance(item, slice | int) for item in items)
    sizes = split.shape(tensor)
    if not layout or not by_place or layout != cuts(layout):
        return _set_whole(split, function, args)
    if any(
        not _is_all(item, sizes[dim]) for dim, item in _by_dim(items) for cut in cuts(layout).values() if cut.dim == dim
    ):
        return _set_whole(split, function, args)
    after = _after(layout, items)
    num_dims = sum(item is None or isinstance(item, slice) for item in items)
    if isinstance(value, Tensor):
        value = laid(split, split.summed(value), cuts(after), num_dims - value.dim())
    if (layout_of(value) if isinstance(value, Tensor) else None) not in (None, after, {}):
        return _set_whole(split, function, args)
    tensor[_local(items, layout)] = value
    return None


def _local(items: list[Any], layout: Layout) -> tuple[Any, ...]:
    """The index on a part: all of a cut dim is all of the part."""
    cut_dims = {cut.dim for cut in cuts(layout).values()}
    return tuple(slice(None) if dim in cut_dims else item for dim, item in _with_dims(items))


def _set_whole(split: Splitter, function: Any, args: Args) -> None:
    for value in (args[0], args[2]):
        for axis in cuts(layout_of(value)) if isinstance(value, Tensor) else ():
            split.allow_gathering(axis, NotSplit("'tensor[…] = …' along a dim that lies over ranks"))
    in_place_on_whole(split, function, args, {})


# ---------------------------------------------------------------- together


def cat(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """An empty tensor of one dim joins any others and adds nothing: a cache of keys and values begins so."""
    given = args[0] if args else kwargs["tensors"]
    tensors = [tensor for tensor in given if split.shape(tensor) != (0,)] or list(given)
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensors[0].dim()
    parts = [split.gather_dims(split.summed(tensor), [dim]) for tensor in tensors]
    parts = alike(split, parts, whole_dims=(dim,))
    return lay(function(parts, dim), layout_of(parts[0]))


def stack(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    tensors = args[0] if args else kwargs["tensors"]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (tensors[0].dim() + 1)
    parts = alike(split, [split.summed(tensor) for tensor in tensors])
    return lay(function(parts, dim), shifted(layout_of(parts[0]), dim, 1))
