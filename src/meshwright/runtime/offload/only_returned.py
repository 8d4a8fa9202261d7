"""What a streamed block computes reaches the rest of the model as its result, or the model is refused.

All microbatches go through a block before the first one's forward goes on, and the graph of a block is made when backward runs it
again. A tensor that a block leaves elsewhere, in an attribute, a list, a global variable or a hook, would be another microbatch's
when the model reads it, and without a gradient. In the first step each function is looked at: tensors that a block makes of its
input or its parameters, and does not return, must not be given to a function outside of that call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import ModelError
from meshwright.runtime._torch import tree_leaves
from meshwright.runtime.read_outside import is_users

ONLY_FIRST = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Functions that take no value of their other tensors."""
NO_VALUE = ("_like", "new_", "size", "dim", "shape", "__get__")
"""Parts of names of functions that take no value of any."""

Made = dict[int, tuple["ref[Tensor]", str]]
"""By identity: tensors that a block made of its input, with its name."""


class OnlyReturned(TorchFunctionMode):
    """While the forward of one microbatch runs."""

    def __init__(self, made: Made) -> None:
        """made: the same for all microbatches."""
        super().__init__()
        self.made = made
        self._block = ""
        self._given: set[int] = set()

    def begin(self, block: str, given: Any) -> None:
        """The block is called with these."""
        self._block = block
        self._given = {id(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}

    def end(self, result: Any) -> None:
        self._block = ""
        for leaf in tree_leaves(result):
            self.made.pop(id(leaf), None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = str(getattr(function, "__name__", function))
        for leaf in leaves:
            block = self._maker(leaf)
            if block and block != self._block and name != "__get__" and is_users():
                raise _left(block, name)
        result = function(*args, **kwargs)
        if self._block and self._depends(name, leaves):
            self._note(tree_leaves(result), leaves)
        return result

    def _maker(self, tensor: Tensor) -> str:
        held, block = self.made.get(id(tensor), (None, ""))
        return block if held is not None and held() is tensor else ""

    def _depends(self, name: str, leaves: list[Tensor]) -> bool:
        """Whether the result has something of the block's input, or of what it trains."""
        if any(part in name for part in NO_VALUE):
            return False
        read = leaves[:1] if name in ONLY_FIRST else leaves
        return any(id(leaf) in self._given or leaf.requires_grad or self._maker(leaf) for leaf in read)

    def _note(self, results: Iterable[Any], given: list[Tensor]) -> None:
        known = {id(leaf) for leaf in given}  # what is changed in place is nothing new
        for leaf in results:
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                self.made[id(leaf)] = (ref(leaf), self._block)


def _left(block: str, function: str) -> ModelError:
    return ModelError(
        f"block '{block}' leaves a tensor that it does not return (in an attribute, a list, a global variable or a hook), and "
        f"'{function}' outside of it reads that: microbatches go through a streamed block side by side, and it would be another "
        "one's. Let the block return it, or keep parameters on the device (offload none or optimizer)"
    )
