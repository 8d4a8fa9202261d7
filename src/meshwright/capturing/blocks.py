"""The blocks of any module: the units the search decides on.

A *repeated* block is an item of a `ModuleList`, `Sequential` or `ModuleDict` whose class occurs there at least twice and which has
children of its own (a transformer layer, a bottleneck). Where such blocks are nested the outermost count. All other
modules that hold parameters become blocks too, as large as possible (the embedding, the head). What a module computes
outside all of them belongs to the block named ''.

A module that is never called as a whole is no block: its model calls the parts of it (`layer.attention(layer.norm(x))`). It is
*opened*: the same parts of all items of a list are the repeated blocks then. Where a model has no list, modules of one class that
lie side by side repeat (`layer1`, `layer2`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator

from torch import nn

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(module: nn.Module, opened: Container[str] = ()) -> dict[str, bool]:
    """Block names in module order → whether the block is a repeated one. opened: modules whose parts are called by others."""
    repeated = set(_repeated(module, "", opened)) or set(_side_by_side(module, "", opened))
    found = dict(_cover(module, "", repeated, opened))
    if any(found.values()):
        return found
    classes = Counter(type(module.get_submodule(name)) for name in found)
    return {name: classes[type(module.get_submodule(name))] > 1 for name in found}


def _repeated(module: nn.Module, path: str, opened: Container[str]) -> Iterator[str]:
    children = {f"{path}{name}": child for name, child in module.named_children()}
    classes = Counter(map(type, children.values())) if isinstance(module, LISTS) else Counter()
    items = {name: child for name, child in children.items() if classes[type(child)] > 1 and _has_children(child)}
    found = [name for name, child in items.items() if not _is_open(child, name, opened)]
    if not found:
        found = [name for child in children for name in _repeated(children[child], f"{child}.", opened)]
    if not found:  # lists in which nothing repeats: whole, where they are called
        found = [name for name, child in items.items() if name not in opened and not has_no_forward(child)]
    yield from found or _columns(items, opened)


def _columns(items: dict[str, nn.Module], opened: Container[str]) -> Iterator[str]:
    """The same part of several items that are not called as a whole: those with children, or else the largest."""
    parts = {
        f"{item}.{name}": (name, child)
        for item, inside in items.items()
        if _is_open(inside, item, opened)
        for name, child in inside.named_children()
        if _num_parameters(child) and not has_no_forward(child) and f"{item}.{name}" not in opened
    }
    alike = Counter((name, type(child)) for name, child in parts.values())
    found = {full: part for full, part in parts.items() if alike[part[0], type(part[1])] > 1}
    large = {full for full, (_, child) in found.items() if _has_children(child)}
    if not large and found:
        most = max(found.values(), key=lambda part: _num_parameters(part[1]))[0]
        large = {full for full, (name, _) in found.items() if name == most}
    yield from (full for full in found if full in large)


def _side_by_side(module: nn.Module, path: str, opened: Container[str]) -> Iterator[str]:
    """Children of one class that are no lists, as high up as there are some."""
    children = dict(module.named_children())
    classes = Counter(map(type, children.values()))
    found = [
        f"{path}{name}"
        for name, child in children.items()
        if classes[type(child)] > 1 and _has_children(child) and not _is_open(child, f"{path}{name}", opened)
    ]
    for name, child in children.items() if not found else ():
        found += _side_by_side(child, f"{path}{name}.", opened)
    yield from found


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_open(module: nn.Module, name: str, opened: Container[str]) -> bool:
    """A list of lists (the stages of a ResNet): its inner items are the blocks. So are the parts of what is never called."""
    return isinstance(module, LISTS) or name in opened


def has_no_forward(module: nn.Module) -> bool:
    """A namespace, that nobody can call."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _cover(module: nn.Module, path: str, repeated: set[str], opened: Container[str]) -> Iterator[tuple[str, bool]]:
    """Children in order: repeated blocks themselves; modules around repeated blocks, and those never called, opened; others
    whole."""
    for name, child in module.named_children():
        full = f"{path}{name}"
        if full in repeated:
            yield full, True
        elif full in opened or any(block.startswith(f"{full}.") for block in repeated):
            yield from _cover(child, f"{full}.", repeated, opened)
        elif any(True for _ in child.parameters()):
            yield full, False


def block_of_parameter(name: str, blocks: Container[str]) -> str:
    """The block that holds a parameter; '' where it lies outside all of them."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        if path in blocks:
            return path
    return ""


def in_order_of_calls(blocks: dict[str, bool], entered: Iterable[str]) -> dict[str, bool]:
    """Stages are cut along it. Blocks that are not called come first: others may read their parameters."""
    called = [name for name in entered if name in blocks]
    return {name: blocks[name] for name in (*(name for name in blocks if name not in set(called)), *called)}
