"""Every private torch name Meshwright uses, each with its reason. Nothing here imports torch.distributed.

`tests/cpu/test_torch_names.py` fails clearly when a torch version moves one of them.
"""

from __future__ import annotations

import contextlib
import typing

import torch
import torch.utils.checkpoint

# A check between two ops must not itself be taken for an op of the model by a mode that watches torch functions.
# Which autograd node runs now, and how many were made: they tie each op of backward to the forward op it is of.
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,  # a tensor of a class of ours is taken as any other, while modes go on watching
    DispatchKey,
    ScriptFunction,  # what `torch.jit.script` makes of a function, and of a module's method: no mode sees their calls
    ScriptMethod,
    _are_functorch_transforms_active,  # inside `vmap` or `torch.func.grad` tensors are wrapped, and their notes hidden
    _current_autograd_node,
    _SetExcludeDispatchKeyGuard,  # an alias that is made below autograd and still counts in-place changes: see `alias_of`
)
from torch._C._autograd import (
    _get_sequence_nr,
    _top_saved_tensors_default_hooks,  # whether saved tensors are packed (recompute): such blocks are not skipped
)

# What `torch.ops.library.name` is: its overloads say whether an operator changes what it is given.
from torch._ops import OpOverloadPacket

# The only hook that sees every op of forward and backward, below autograd; torch has no public name for it.
# A value read on a fake tensor raises one of these; capture answers with a recorded guess.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,  # what such a mode makes; it knows its mode, which is how a deferred module leads to its tape
    FakeTensorMode,  # tensors with shape, dtype and device but no memory; meta tensors take other attention paths
    unset_fake_temporarily,  # values of the batch are computed while a forward on such tensors waits for them
)

# A user's autograd function is called through this class, and nothing else that sees the call is public.
from torch.autograd.function import _SingleLevelFunction

# What a module's full backward hook hangs on; it must be told from a user's functions.
from torch.nn.modules._functions import BackwardHookFunction

# Which function modes a block runs in: torch leaves them all in backward, where the block may be run again. A thread of ours takes
# over both kinds of modes.
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# What a module takes and returns may be any nest of dicts, tuples and dataclasses; torch's own walk knows them all.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "BackwardHookFunction",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DispatchKey",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverloadPacket",
    "ScriptFunction",
    "ScriptMethod",
    "TorchDispatchMode",
    "_SetExcludeDispatchKeyGuard",
    "_SingleLevelFunction",
    "_are_functorch_transforms_active",
    "_current_autograd_node",
    "_get_current_dispatch_mode_stack",
    "_get_current_function_mode_stack",
    "_get_sequence_nr",
    "_top_saved_tensors_default_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "unset_fake_temporarily",
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


def sums_within_groups(module: typing.Any) -> list[typing.Any]:
    """Gradients that a module under fully_shard has added up within its sharding group but not yet across the groups: it
    keeps them to itself, and no hook shows them."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one of them
    return [group._partial_reduce_output for group in groups if group and group._partial_reduce_output is not None]


def drop_gather_ahead(module: typing.Any) -> None:
    """Forget what a module under fully_shard gathered ahead for a backward that never came (a teacher's block): the next forward
    would compute with the values of then. torch drops it after the last backward of a step only."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group and group._all_gather_result is not None:
            group.wait_for_unshard()
            group.reshard()


def checks_distributions() -> bool:
    """Whether torch.distributions look at the values they are given: what the public setter sets, it does not tell."""
    return torch.distributions.Distribution._validate_args


def pass_through(module: typing.Any, given: typing.Any) -> typing.Any:
    """The same tensors, past a module under fully_shard that is not called: it is gathered, and given up, in forward and in
    backward as if it were. Its own hooks would cast what it is given."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        (given,), _ = group.pre_forward(module, (given,), {})
        given = group.post_forward(module, (), given)
    leaves, form = tree_flatten(given)
    leaves = [
        leaf.clone() if getattr(leaf, "_base", None) is not None else leaf for leaf in leaves
    ]  # hooks hang on no view
    return state._register_pre_backward_hook(tree_unflatten(leaves, form))


def alias_of(tensor: typing.Any) -> typing.Any:
    """The tensor without its graph, made inside a dispatch mode; in-place changes of the one count on the other."""
    with _SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def forget_conversions(mode: typing.Any) -> None:
    """A fake mode refers weakly to the tensors it made, and to those whose values it knows; `Module.to` refuses tensors that
    something refers to."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
    mode.fake_tensor_converter.constant_storage_mapping.clear()


def finish_sharded_backward(module: typing.Any) -> None:
    """Reduce the gradients of a sharded module and what is inside it, now. `fully_shard` does it by itself at the end of a
    backward; weights whose gradients are made later than that have no public way."""
    module._get_fsdp_state()._root_post_backward_final_callback()


def around_calls(module: typing.Any, wrap: typing.Any) -> None:
    """Every call of a module goes through a wrapper, its hooks included: those that shard a block belong to the block. Python
    looks `__call__` up on the class, which others share; this is the function it calls on the module itself."""
    module._call_impl = wrap(module._call_impl)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash kernels with the logarithm of each row's sum of exponentials, by which results over several pieces of the
    keys are merged: no public function gives it. The CPU's takes masks, CUDA's none."""
    if query.device.type == "cpu":
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = on_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        on_cuda = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = on_cuda(query, key, value, 0.0, causal, False, scale=scale)
    return out, lse


def flash_gradients(
    gradient: torch.Tensor, tensors: tuple[torch.Tensor, ...], mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of query, key and value. tensors: these, and the result and sums of all pieces together, which no public function
    takes."""
    if gradient.device.type == "cpu":
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_query, of_key, of_value = on_cpu(gradient, *tensors, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        on_cuda = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = (tensors[0].shape[-2], tensors[1].shape[-2])
        undrawn = torch.zeros(
            2, dtype=torch.uint64, device=gradient.device
        )  # as forward gives it where nothing is dropped
        of_query, of_key, of_value = on_cuda(
            gradient, *tensors, None, None, *lengths, 0.0, causal, undrawn, undrawn, scale=scale
        )
    return of_query, of_key, of_value


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Many copies, in one kernel where the device can: a launch for each would take longer than the copies."""
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def has_step_hooks(optimizer: typing.Any) -> bool:
    """Whether somebody looks on when an optimizer steps: a hook may read what a backward beside it is writing."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def forget_step_hooks(optimizer: typing.Any) -> None:
    """Of an optimizer that is a copy: nobody is to see a step that is taken for trial."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = {}, {}


def at_end_of_backward(callback: typing.Callable[[], None]) -> None:
    """Call back when the backward that runs now has made all its gradients. `fully_shard` and replicas end theirs in the same
    way; torch has no public name for it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What a transform such as `vmap` has wrapped, however often; torch has no public name for it."""
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def checkpoint_parts(
    reentrant: typing.Callable[..., typing.Any], around: typing.Callable[..., typing.Any]
) -> typing.Iterator[None]:
    """`torch.utils.checkpoint.checkpoint` may be bound in a model long before; both its forms look up these two at each call.

    reentrant: called with the function and its arguments. around: called with torch's own and what that is called with."""
    home: typing.Any = torch.utils.checkpoint
    form, generator = home.CheckpointFunction, home._checkpoint_without_reentrant_generator

    class CalledOnce:
        @staticmethod
        def apply(function: typing.Any, preserves: bool, *arguments: typing.Any) -> typing.Any:
            return reentrant(function, *arguments)

    home.CheckpointFunction = CalledOnce
    home._checkpoint_without_reentrant_generator = lambda *given, **options: around(generator, *given, **options)
    try:
        yield
    finally:
        home.CheckpointFunction, home._checkpoint_without_reentrant_generator = form, generator


def gradient_hooks(tensor: torch.Tensor) -> list[typing.Any]:
    """What was registered on a tensor to run when its gradient is made; torch lists them under these names only."""
    found = (getattr(tensor, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [hook for hooks in found for hook in hooks.values()]
