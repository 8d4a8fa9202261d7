"""The blocks of any module: the units the search decides on.

A *repeated* block is an item of a `ModuleList` or `Sequential` whose class occurs there at least twice and which has
children of its own (a transformer layer, a bottleneck). Where such blocks are nested the outermost count. All other
modules that hold parameters become blocks too, as large as possible (the embedding, the head). What a module computes
outside all of them belongs to the block named ''.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator

from torch import nn


def find_blocks(module: nn.Module) -> dict[str, bool]:
    """Block names in module order → whether the block is a repeated one."""
    repeated = set(_repeated(module, ""))
    return dict(_cover(module, "", repeated))


def _repeated(module: nn.Module, path: str) -> Iterator[str]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        classes = Counter(type(child) for child in module)
        items = [
            (name, child)
            for name, child in module.named_children()
            if classes[type(child)] > 1 and any(True for _ in child.children()) and not _is_container(child)
        ]
        if items:
            yield from (f"{path}{name}" for name, _ in items)
            return
    for name, child in module.named_children():
        yield from _repeated(child, f"{path}{name}.")


def _is_container(module: nn.Module) -> bool:
    """A list of lists (the stages of a ResNet) is opened: its inner items are the blocks."""
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _cover(module: nn.Module, path: str, repeated: set[str]) -> Iterator[tuple[str, bool]]:
    """Children in order: repeated blocks themselves; modules around repeated blocks opened; others whole."""
    for name, child in module.named_children():
        full = f"{path}{name}"
        if full in repeated:
            yield full, True
        elif any(block.startswith(f"{full}.") for block in repeated):
            yield from _cover(child, f"{full}.", repeated)
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
