"""A user's own loop around a spread module: forwards are counted, gradients are settled when a backward ends.

forward            data parallelism is told whether this microbatch is the last of its step
backward begins    gradients that were settled become summands again: the first rank along tp keeps them, the others start
                   from zero, so that a second backward of the same step adds to them rightly
backward ends      of the last microbatch: summands along tp are added up; parts of gradients are marked (gradients.py)
optimizer.step()   refused between microbatches; it sees gradients as torch made them
in between         the loop's own code reads parameters and gradients: parts of them are marked as such
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.models.one_process import seen_under
from meshwright.models.own_recompute import own_recompute_left_out
from meshwright.runtime._torch import at_end_of_backward, tree_leaves
from meshwright.runtime.clip import axes_of_parameters
from meshwright.runtime.data_parallel import give_up_gathered, inner, prepare_microbatch, reduce_scalars
from meshwright.runtime.own_loop.limits import HandedOut, Replicas
from meshwright.runtime.own_loop.parts import Parts
from meshwright.runtime.reach import reach
from meshwright.runtime.same_samples import SameSamples
from meshwright.runtime.split.model import SplitModel, whole_output
from meshwright.runtime.synced_buffers import SyncedBuffers
from meshwright.runtime.update import dividing_groups
from meshwright.runtime.usage import drop_unused


class OwnLoop:
    """Counts training forwards between updates, and tells data parallelism which backward is the last."""

    def __init__(self, module: nn.Module, plan: Plan, mesh: DeviceMesh, split: SplitModel | None) -> None:
        self.module, self.plan, self.split = module, plan, split
        self.done = 0
        self.group = mesh.get_group("dp")
        own = inner(module)
        self.buffers = SyncedBuffers(own, self.group)
        self.parts = Parts(axes_of_parameters(own, plan), dividing_groups(own, plan, mesh))
        self.samples = SameSamples(plan, mesh.get_local_rank("dp"))
        self._is_settled = self._in_backward = False
        self.handed_out, self.replicas = HandedOut(own), Replicas(module)

    def before_forward(self, module: nn.Module, arguments: Any) -> None:
        self._in_backward = False  # one that ended in an error never said so
        self.parts.unmark_parameters()
        if module.training and torch.is_grad_enabled():
            self.done += 1
            self.replicas.before_forward(self.module)
            prepare_microbatch(self.module, self.plan, is_last=self._is_last())
            self.buffers.before_forward()

    def after_forward(self, module: nn.Module, *_: Any) -> None:
        is_training = module.training and torch.is_grad_enabled()
        if is_training:
            self.buffers.after_forward()
        if self.split is not None:
            self.parts.owed = tuple(self.split.owed(inner(self.module)))
        self.parts.mark_parameters(with_shards=not is_training)

    def around(self, forward: Callable[..., Any], context: Callable[[], Any]) -> Callable[..., Any]:
        """The module's forward as the plan computes it; its output is whole, and tells when a backward begins."""

        @wraps(forward)
        def run(*arguments: Any, **options: Any) -> Any:
            if self.module.training and torch.is_grad_enabled():
                self.samples.check((arguments, options))
            if self.split is not None:
                self.split.splitter.read((arguments, options))
            with context(), own_recompute_left_out(), seen_under(self.plan):
                output = forward(*arguments, **options)
            if self.split is not None:
                output = whole_output(self.split.splitter, output)
            return self._told_of_backward(reach(output, self.module))

        return run

    def _told_of_backward(self, output: Any) -> Any:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin_backward)
        return output

    def _begin_backward(self, _: Tensor) -> None:
        if self._in_backward:
            return  # by another tensor of the output
        self._in_backward = True
        self.parts.unmark_parameters()
        self.replicas.begin_backward()
        self.parts.unmark()
        if self._is_settled and self.split is not None:
            self.split.unsettle_gradients(inner(self.module))
        self._is_settled = False
        at_end_of_backward(lambda: at_end_of_backward(self._end_backward))  # after fully_shard's own

    def _end_backward(self) -> None:
        self._in_backward = False
        self.handed_out.check()
        self.parts.unreduced = "" if self._is_last() else self._between_microbatches()
        if self._is_last():
            self._settle()
        self.parts.mark(self._gathered() if self.parts.unreduced else ())
        self.parts.mark_parameters()

    def _gathered(self) -> list[nn.Parameter]:
        own = {id(parameter) for parameter, _ in self.parts.parameters}
        return [parameter for parameter in self.module.parameters() if id(parameter) not in own]

    def _settle(self) -> None:
        if not self._is_settled:
            reduce_scalars(inner(self.module))
            if self.split is not None:
                self.split.settle_gradients(inner(self.module))
        self._is_settled = True

    def before_update(self, *_: Any) -> None:
        if not self._is_last():
            raise PlanError(f"optimizer.step() {self._between_microbatches()}")
        self.done = 0
        self.parts.unmark_parameters()
        self.parts.unmark()
        self._settle()
        drop_unused(inner(self.module))
        give_up_gathered(self.module)  # a forward without training in between may have left them

    def after_update(self, *_: Any) -> None:
        self.parts.mark_parameters()

    def _is_last(self) -> bool:
        return self.done % self.plan.num_microbatches == 0

    def _between_microbatches(self) -> str:
        return (
            f"after {self.done} of {self.plan.num_microbatches} microbatches: their gradients are not reduced yet; run all of "
            "them first, or set num_microbatches in the plan"
        )


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """torch's function of that name for a model of `wrap`: gradients are scaled by the norm of the whole model's, which is
    returned, the same number on every rank. Every rank calls it."""
    found: Tensor = nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type, error_if_nonfinite)
    full = getattr(found, "full_tensor", None)
    return found if full is None else full()
