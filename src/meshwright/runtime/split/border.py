"""Borders around blocks: what the Splitter needs to know when a block begins.

Inside a border every parameter has its name and, where it is cut, its layout; the Splitter is active, also when backward runs a
recomputed block again. `fully_shard` hands a block other tensor objects than it was called with, without the notes on them:
where it is used, notes are taken off before its hooks and put back behind them.
What a block hands on is no partial sum: it is added up once, for all that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from meshwright.runtime._torch import DisableTorchFunction, tree_flatten, tree_leaves, tree_unflatten
from meshwright.runtime.split.layout import Addend, Layout, lay, layout_of
from meshwright.runtime.split.splitter import NotSplit, Splitter
from meshwright.runtime.split.token_blocks import TokenBlocks
from meshwright.runtime.split.weights import layouts_of_parameters

Notes = list[Layout | None]


class Border:
    """Around one block, or around the whole module for what is in none."""

    def __init__(
        self, split: Splitter, name: str, block: nn.Module, named: list[tuple[str, nn.Module, str]], tokens: TokenBlocks
    ) -> None:
        self.split, self.name, self.tokens = split, name, tokens
        self.named = named
        """The name of a parameter, as `named_parameters()` has it, the module that holds it, and its name there."""
        self.layouts: dict[str, Layout] = {}
        self.arrived: Notes | None = None
        self.left: Notes | None = None
        self.block = block
        block.forward = self._guarded(block.forward)

    def _guarded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            _put_back((args, kwargs), self.arrived)
            if self.split.is_active:
                output = self._run(forward, args, kwargs)
            else:
                with self.split:
                    output = self._run(forward, args, kwargs)
            if self.arrived is not None:
                self.left = _notes(output)
            return output

        return run

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._name_parameters()
        outer, self.split.shared = self.split.shared, {}
        try:
            args, kwargs = self.tokens.entered(self.name, (args, kwargs))
            return self.tokens.left(self.name, self._summed(forward(*args, **kwargs)))
        except NotSplit as error:
            if error.block is None:
                error.block = self.name
            raise
        finally:
            self.split.shared = outer

    def _summed(self, output: Any) -> Any:
        """Without addends: those who read what a block hands on would each add them up."""
        leaves, shape = tree_flatten(output)
        if not self.name or not any(map(_is_addend, leaves)):
            return output
        with DisableTorchFunction():  # as inside a rule
            whole = [self.split.summed(leaf) if _is_addend(leaf) else leaf for leaf in leaves]
        return tree_unflatten(whole, shape)

    def _name_parameters(self) -> None:
        for name, holder, own_name in self.named:
            parameter = holder._parameters.get(own_name)
            if (
                parameter is not None and vars(holder).get(own_name) is not parameter
            ):  # another stage's is whole, or gone
                self.split.names[id(parameter)] = name
                lay(parameter, self.layouts.get(name))

    # ------------------------------------------------------------ around the hooks of fully_shard

    def carry_notes(self) -> None:
        """To be called when fully_shard has put its hooks on the block."""
        self.block.register_forward_pre_hook(self._take_off, with_kwargs=True, prepend=True)
        self.block.register_forward_hook(self._put_on)

    def _take_off(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.arrived = _notes((args, kwargs))

    def _put_on(self, block: nn.Module, args: Any, output: Any) -> None:
        _put_back(output, self.left)
        self.left = None


def _is_addend(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and any(isinstance(share, Addend) for share in (layout_of(leaf) or {}).values())


def _notes(values: Any) -> Notes:
    return [layout_of(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(values)]


def _put_back(values: Any, notes: Notes | None) -> None:
    for leaf, layout in zip(tree_leaves(values), notes or (), strict=False):
        if layout:
            lay(leaf, layout)


def draw_borders(
    module: nn.Module, blocks: tuple[str, ...], split: Splitter, token_blocks: tuple[str, ...] = ()
) -> list[Border]:
    """One around each block; one around the module, which knows all parameters: a model may call parts of a block by themselves."""
    tokens = TokenBlocks(split, token_blocks)
    layouts = layouts_of_parameters(module)
    blocks = tuple(name for name in blocks if not isinstance(module.get_submodule(name), nn.ModuleList | nn.ModuleDict))
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    held: dict[str, list[tuple[str, nn.Module, str]]] = {name: [] for name in ("", *blocks)}
    for path, holder in module.named_modules():
        for own_name, parameter in holder._parameters.items():
            if parameter is not None:
                for home in {"", _home(path, blocks)}:
                    held[home].append((first_names[id(parameter)], holder, own_name))
    borders = [
        Border(split, name, module.get_submodule(name), named, tokens)
        for name, named in held.items()
        if named or not name
    ]
    for border in borders:
        border.layouts = layouts
    return borders


def _home(path: str, blocks: tuple[str, ...]) -> str:
    """The block a module lies in, or ''."""
    return next((name for name in blocks if path == name or path.startswith(f"{name}.")), "")
