"""Every private torch name Meshwright uses, each with its reason. Nothing here imports torch.distributed.

`tests/cpu/test_torch_names.py` fails clearly when a torch version moves one of them.
"""

from __future__ import annotations

import typing

# Which autograd node runs now, and how many were made: they tie each op of backward to the forward op it is of.
from torch._C import _current_autograd_node
from torch._C._autograd import (
    _get_sequence_nr,
    _top_saved_tensors_default_hooks,  # whether saved tensors are packed (recompute): such blocks are not skipped
)

# The only hook that sees every op of forward and backward, below autograd; torch has no public name for it.
# A value read on a fake tensor raises one of these; capture answers with a recorded guess.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,  # how a tensor of another stage is told from one that is here
    FakeTensorMode,  # tensors with shape, dtype and device but no memory; meta tensors take other attention paths
)

# Which function modes a block ran in: recompute runs it again in them, in whatever thread backward has.
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

# What a module takes and returns may be any nest of dicts, tuples and dataclasses; torch's own walk knows them all.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "_current_autograd_node",
    "_get_current_function_mode_stack",
    "_get_sequence_nr",
    "_top_saved_tensors_default_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
]


def compile_replicas_whole() -> None:
    """Blocks inside replicas are compiled as they are; torch would cut them where a bucket of gradients is full, and fails
    to cut what is recomputed. torch has no public name for this setting of the process."""
    from torch._dynamo import config  # takes a second to import: only where something is compiled

    config.optimize_ddp = False


def finish_sharded_backward(module: typing.Any) -> None:
    """Reduce the gradients of a sharded module and what is inside it, now. `fully_shard` does it by itself at the end of a
    backward; weights whose gradients are made later than that have no public way."""
    module._get_fsdp_state()._root_post_backward_final_callback()


def around_calls(module: typing.Any, wrap: typing.Any) -> None:
    """Every call of a module goes through a wrapper, its hooks included: those that shard a block belong to the block. Python
    looks `__call__` up on the class, which others share; this is the function it calls on the module itself."""
    module._call_impl = wrap(module._call_impl)
