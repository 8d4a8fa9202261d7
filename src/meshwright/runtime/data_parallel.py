"""Data parallelism: replicate, or shard the training state (ZeRO) by one mechanism.

| ZeRO | parameters gathered              | gradients reduced                       |
|------|----------------------------------|-----------------------------------------|
| 0    | always whole                     | all-reduce in the last microbatch       |
| 1    | once a step, kept until its end  | reduce-scatter in the last microbatch   |
| 2    | once a step, kept until its end  | reduce-scatter in every microbatch      |
| 3    | before each use of a block       | reduce-scatter in every microbatch      |

ZeRO 0 is DistributedDataParallel; 1, 2 and 3 are `fully_shard` with other answers to when to gather and when to reduce.
Hybrid sharding gathers and reduce-scatters within groups of H ranks; the dp / H ranks that hold the same shard all-reduce it
once a step, after the last microbatch.
Each repeated block is gathered by itself; all else forms one group that stays gathered from forward to backward. Experts that
lie over ep are groups of their own, replicated or sharded over the dp/ep ranks that hold the same ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.plan import Plan
from meshwright.models.parameters import list_parameters
from meshwright.rules.groups import shard_groups
from meshwright.runtime._torch import FakeTensor, leave_out_of_replicas, tree_leaves
from meshwright.runtime._torch_distributed import look_once_at_lists
from meshwright.runtime.buckets import reduce_in_buckets, set_last
from meshwright.runtime.communicators import state_mesh
from meshwright.runtime.deferred import materialise
from meshwright.runtime.experts import expert_parameters_of, expert_spread_of
from meshwright.runtime.gather import send_from_first_rank
from meshwright.runtime.gathered import Gathered
from meshwright.runtime.passed_over import PassedOver
from meshwright.runtime.pipeline.buckets import Buckets
from meshwright.runtime.precision import sharded_policy
from meshwright.runtime.usage import watch_usage

SCALARS = "_meshwright_scalars"


def spread(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """The module, replicated or sharded over the dp axis."""
    if plan.zero:
        return shard_state(module, plan, mesh)
    materialise(module)
    if mesh["dp"].size() == 1:
        return module
    experts = expert_spread_of(module)
    if experts is not None and experts.replicas.size() > 1:
        reduce_in_buckets(module, expert_parameters_of(module).values(), experts.replicas.get_group())
    return replicate(module, mesh)


def replicate(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every rank holds everything; buckets of gradients are all-reduced while backward goes on."""
    leave_out_of_replicas(module, list(expert_parameters_of(module)))
    option, group = _forward_buffer_option(), mesh.get_group("dp")
    if option == "broadcast_buffers":  # by this name the option says of the start too that buffers are not sent round
        for buffer in module.buffers():
            dist.broadcast(buffer.detach(), group=group, group_src=0)
    watch_usage(module, group)
    return DistributedDataParallel(
        module,
        process_group=group,
        gradient_as_bucket_view=True,
        **{option: False},  # type: ignore[arg-type]
    )


def _forward_buffer_option() -> str:
    """torch 2.13 renamed the option that sends buffers round before every forward; 2.11 knows only the old name."""
    options = inspect.signature(DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"


def give_up_gathered(module: nn.Module) -> None:
    """Forget gathered parameters: after an update, or when only an evaluation needed them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def shard_state(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """Each rank holds 1/dp, or under hybrid sharding 1/H, of every parameter, gradient and optimizer state."""
    look_once_at_lists()
    policy, ranks = sharded_policy(plan), state_mesh(plan, mesh)
    shard_experts(module, plan)
    for name in filter(None, shard_groups(list_parameters(module), plan.blocks)):
        block = module.get_submodule(name)
        make_alike(block, mesh)
        fully_shard(
            block,
            mesh=ranks,
            reshard_after_forward=plan.zero == 3,
            mp_policy=policy,
            ignored_params=set(scalars(block)),
        )
    make_alike(module, mesh)
    fully_shard(module, mesh=ranks, reshard_after_forward=False, mp_policy=policy, ignored_params=set(scalars(module)))
    vars(module)[SCALARS] = Buckets(scalars(module), mesh.get_group("dp"))
    usage, passed_over = watch_usage(module, mesh.get_group("dp")), None
    if plan.mesh.dp > 1 and _reduces_unused(module):
        passed_over = _passed_over(module, plan, mesh)
    Gathered(module, gives_up=plan.zero == 3, usage=usage, passed_over=passed_over)
    return module


def _reduces_unused(module: nn.Module) -> bool:
    """Parameters that a rank's forward leaves out count as zeros: ranks that reduced different ones would not fit together. torch
    2.11 does not know how."""
    count_as_zeros = getattr(module, "set_reduce_scatter_unused_params", None)
    if count_as_zeros is not None:
        count_as_zeros(True)
    return count_as_zeros is not None


def _passed_over(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> PassedOver:
    alone = set(filter(None, shard_groups(list_parameters(module), plan.blocks)))
    blocks = {name: module.get_submodule(name) for name in plan.blocks if name in alone}
    return PassedOver(blocks, mesh.get_group("dp"), has_experts=expert_spread_of(module) is not None)


def scalars(module: nn.Module) -> list[nn.Parameter]:
    """Parameters without a dim (a temperature, a gate), which `fully_shard` cannot cut: every rank holds them, and their gradients
    are averaged once a step (`reduce_scalars`)."""
    return [parameter for parameter in module.parameters() if parameter.dim() == 0]


def reduce_scalars(module: nn.Module) -> None:
    buckets: Buckets | None = vars(module).get(SCALARS)
    if buckets is not None:
        buckets.reduce()
        buckets.finish()


def make_alike(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give a module that is about to be sharded its values: of a deferred model, no more than this much is whole at a time."""
    materialise(module)
    copy_from_first_rank(module, mesh)


def shard_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks whose shards make up the parameters; None where each rank has all of them."""
    sharded = next((p for p in module.parameters() if isinstance(p, DTensor)), None)
    group = None if sharded is None else sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1)
    return group if group is not None and group.size() > 1 else None


def shard_experts(module: nn.Module, plan: Plan, blocks: Collection[str] | None = None) -> None:
    """Experts that lie over ep, over the ranks that hold the same ones; all, or those in some blocks."""
    experts = expert_spread_of(module)
    if experts is None:
        return
    ranks, policy = experts.replicas, sharded_policy(plan)
    for name in experts.names:
        if blocks is not None and not any(f"{name}.".startswith(f"{block}.") for block in blocks):
            continue
        materialise(module.get_submodule(name))
        fully_shard(module.get_submodule(name), mesh=ranks, reshard_after_forward=plan.zero == 3, mp_policy=policy)


def copy_from_first_rank(module: nn.Module, mesh: DeviceMesh, left_out: Collection[int] = ()) -> None:
    """Ranks may have started from other random weights: the first one's count. left_out: ids of parameters that differ."""
    group = mesh.get_group("dp")
    apart = {*left_out, *(id(parameter) for parameter in expert_parameters_of(module).values())}
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor) and id(tensor) not in apart:  # a block that is sharded by now; experts
            dist.broadcast(tensor.detach(), group=group, group_src=0)


def agree_on_values(module: nn.Module, plan: Plan) -> None:
    """Before a model is divided, all ranks hold the first one's values. A deferred model has the same ones everywhere."""
    if plan.world == plan.mesh.dp and plan.mesh.ep == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, FakeTensor):
            dist.broadcast(tensor.detach(), src=0)
    for tensor in _plain_tensors(module):
        send_from_first_rank(tensor)


def _plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Attributes that are neither parameters nor buffers, such as frequencies drawn when the model was made."""
    of_torch = vars(nn.Module())
    for part in module.modules():
        own = [value for name, value in vars(part).items() if name not in of_torch]
        yield from (leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor) and _has_own_memory(leaf))


def _has_own_memory(tensor: Tensor) -> bool:
    """Whether each of its elements can be written."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not isinstance(tensor, FakeTensor | DTensor)
    return is_plain and 0 not in tensor.stride()


def prepare_microbatch(module: nn.Module, plan: Plan, is_last: bool) -> None:
    """Say before a microbatch's forward whether its backward reduces gradients and gives up gathered parameters."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = is_last
        set_last(inner(module), is_last)
    elif isinstance(module, FSDPModule):
        prepare_shards(module, plan, is_last)


def prepare_shards(module: FSDPModule, plan: Plan, is_last: bool, is_whole: bool = True) -> None:
    """is_whole: not the first half of a backward in halves, which neither reduces nor gives up anything."""
    module.set_is_last_backward(is_whole and is_last)
    module.set_requires_gradient_sync(is_whole and (is_last or plan.zero >= 2))
    module.set_requires_all_reduce(is_whole and is_last)
    module.set_reshard_after_backward(is_whole and (is_last or plan.zero == 3))


def inner(module: nn.Module) -> nn.Module:
    """The user's module, without a replica wrapper around it."""
    return module.module if isinstance(module, DistributedDataParallel) else module
