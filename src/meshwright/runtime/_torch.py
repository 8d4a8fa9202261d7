"""Every private torch name Meshwright uses, each with its reason. Nothing here imports torch.distributed.

`tests/cpu/test_torch_names.py` fails clearly when a torch version moves one of them.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

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
    "_get_sequence_nr",
    "_top_saved_tensors_default_hooks",
    "pending_collectives",
    "set_group_timeouts",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
]


def compile_replicas_whole() -> None:
    """Blocks inside replicas are compiled as they are; torch would cut them where a bucket of gradients is full, and fails
    to cut what is recomputed. torch has no public name for this setting of the process."""
    from torch._dynamo import config  # takes a second to import: only where something is compiled

    config.optimize_ddp = False


def pending_collectives() -> list[dict[str, Any]]:
    """Collectives that were called and are not done, from torch's flight recorder: the only place that knows those which
    torch's own C++ calls (buckets of gradients). Empty where the recorder has no buffer (TORCH_FR_BUFFER_SIZE)."""
    from torch._C import _distributed_c10d as c10d

    dumps = (getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    entries = [entry for dump in dumps if dump for entry in json.loads(dump() or "{}").get("entries", ())]
    return [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]


def set_group_timeouts(timeout: timedelta, done: set[str]) -> None:
    """Every process group not among the done ones waits this long; groups of a mesh take no such option when they are made."""
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group, name in list(_world.pg_names.items()):
        if name not in done:
            done.add(name)
            _set_pg_timeout(timeout, group)
