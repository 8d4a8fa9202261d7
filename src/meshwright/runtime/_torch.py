"""Every private torch name Meshwright uses, each with its reason. Nothing here imports torch.distributed.

`tests/cpu/test_torch_names.py` fails clearly when a torch version moves one of them.
"""

from __future__ import annotations

# A check between two ops must not itself be taken for an op of the model by a mode that watches torch functions.
# Which autograd node runs now, and how many were made: they tie each op of backward to the forward op it is of.
from torch._C import DisableTorchFunction, _current_autograd_node
from torch._C._autograd import (
    _get_sequence_nr,
    _top_saved_tensors_default_hooks,  # whether saved tensors are packed (recompute): such blocks are not skipped
)

# The only hook that sees every op of forward and backward, below autograd; torch has no public name for it.
# A value read on a fake tensor raises one of these; capture answers with a recorded guess.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,  # tensors with shape, dtype and device but no memory; meta tensors take other attention paths
)

# Which function modes a block runs in: torch leaves them all in backward, where the block may be run again.
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

# What a module takes and returns may be any nest of dicts, tuples and dataclasses; torch's own walk knows them all.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
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
