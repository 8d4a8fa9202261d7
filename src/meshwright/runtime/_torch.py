"""Every private torch name Meshwright uses, each with its reason. Nothing here imports torch.distributed.

`tests/cpu/test_torch_names.py` fails clearly when a torch version moves one of them.
"""

from __future__ import annotations

import torch

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
    FakeTensorMode,  # tensors with shape, dtype and device but no memory; meta tensors take other attention paths
)
from torch.utils._python_dispatch import TorchDispatchMode

# What a module takes and returns may be any nest of dicts, tuples and dataclasses; torch's own walk knows them all.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "TorchDispatchMode",
    "_current_autograd_node",
    "_get_sequence_nr",
    "_top_saved_tensors_default_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
]


def leave_out_of_replicas(module: torch.nn.Module, names: list[str]) -> None:
    """Replicas neither copy nor reduce these parameters: other ranks hold other ones. torch has no public name for it."""
    from torch.nn.parallel import DistributedDataParallel  # it imports torch.distributed

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def compile_replicas_whole() -> None:
    """Blocks inside replicas are compiled as they are; torch would cut them where a bucket of gradients is full, and fails
    to cut what is recomputed. torch has no public name for this setting of the process."""
    from torch._dynamo import config  # takes a second to import: only where something is compiled

    config.optimize_ddp = False
