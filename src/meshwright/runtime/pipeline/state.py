"""The training state of one stage, spread over the dp axis; the same table as `runtime/data_parallel.py`.

A stage holds several microbatches at once, whose backwards come when the schedule says so: replicas reduce their gradients after
the stage's last backward, in buckets (`buckets.py`), and `fully_shard` is told at every backward whether it is to reduce. The
blocks of a stage and what else it holds are parts of one module, which is called around the user's forward: `fully_shard` sees
one root, and the rest of the stage's parameters are its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.core.plan import Plan
from meshwright.models.parameters import list_parameters
from meshwright.rules.groups import shard_groups
from meshwright.runtime._torch import finish_sharded_backward
from meshwright.runtime.data_parallel import copy_from_first_rank, prepare_shards, scalars, shard_experts
from meshwright.runtime.experts import expert_parameters_of, expert_spread_of
from meshwright.runtime.gathered import Gathered
from meshwright.runtime.pipeline.buckets import Buckets
from meshwright.runtime.pipeline.cut import StageParameters
from meshwright.runtime.precision import sharded_policy


class Held(nn.Module):
    """What a stage holds: its blocks, and the parameters of no block, under the names they have in the user's module."""

    def __init__(self, module: nn.Module, stage: StageParameters) -> None:
        super().__init__()
        self.loose: dict[str, tuple[nn.Module, str]] = {}
        self.user = [module]  # in a list: it is no part of this one
        for name in stage.blocks:
            self.add_module(_key(name), module.get_submodule(name))
        for name in stage.names:
            if not any(name.startswith(f"{block}.") for block in stage.blocks):
                path, _, leaf = name.rpartition(".")
                owner = module.get_submodule(path)
                self.loose[_key(name)] = (owner, leaf)
                self.register_parameter(_key(name), owner._parameters[leaf])

    def forward(self, batch: Any, run: Callable[[Any], Any]) -> Any:
        """The batch is an argument so that `fully_shard` casts it as it casts a module's."""
        with self._in_place():
            return run(batch)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Gathered parameters where the user's code looks for them."""
        gathered = [(owner, leaf, self._parameters[key]) for key, (owner, leaf) in self.loose.items()]
        moved = [(owner, leaf) for owner, leaf, parameter in gathered if owner._parameters.get(leaf) is not parameter]
        for owner, leaf, parameter in gathered:
            if (owner, leaf) in moved:
                vars(owner)[leaf] = parameter
        try:
            yield
        finally:
            for owner, leaf in moved:
                del vars(owner)[leaf]


class StageState:
    def __init__(
        self, module: nn.Module, stage: StageParameters, plan: Plan, mesh: DeviceMesh, ranks: DeviceMesh
    ) -> None:
        """ranks: of the mesh, those that share the state out (`communicators.state_mesh`)."""
        self.plan = plan
        self.held = Held(module, stage)
        self.used: dict[int, nn.Parameter] = {}
        """Where backwards come in halves: the gathered parameters that have had a gradient."""
        of_others = {id(parameter) for parameter in expert_parameters_of(module).values()}
        copy_from_first_rank(self.held, mesh, of_others)
        if plan.zero:
            self._shard(module, stage, ranks)
        whole = [Buckets(scalars(self.held), mesh.get_group("dp"))]
        self.buckets = whole if plan.zero else self._buckets(module, mesh, of_others)

    def _buckets(self, module: nn.Module, mesh: DeviceMesh, of_others: set[int]) -> list[Buckets]:
        """Experts that lie over ep are averaged over the ranks that hold the same ones."""
        experts, own = expert_spread_of(module), list(self.held.parameters())
        found = [Buckets([one for one in own if id(one) not in of_others], mesh.get_group("dp"))]
        if experts is not None:
            found.append(Buckets([one for one in own if id(one) in of_others], experts.replicas.get_group()))
        return found

    def _shard(self, module: nn.Module, stage: StageParameters, ranks: DeviceMesh) -> None:
        policy = sharded_policy(self.plan)
        shard_experts(module, self.plan, stage.blocks)
        for name in filter(None, shard_groups(self._listed(), self.plan.blocks)):
            block = module.get_submodule(name)
            fully_shard(
                block,
                mesh=ranks,
                reshard_after_forward=self.plan.zero == 3,
                mp_policy=policy,
                ignored_params=set(scalars(block)),
            )
        fully_shard(
            self.held, mesh=ranks, reshard_after_forward=False, mp_policy=policy, ignored_params=set(scalars(self.held))
        )
        Gathered(self.held, gives_up=self.plan.zero == 3)
        for key, (owner, leaf) in self.held.loose.items():
            owner._parameters[leaf] = self.held._parameters[key]

    def _listed(self) -> Iterable[Any]:
        for parameter in list_parameters(self.held):
            tied = parameter.tied_to
            yield msgspec.structs.replace(
                parameter, name=_name(parameter.name), tied_to=None if tied is None else _name(tied)
            )

    def before_backward(self, is_last: bool, whole: bool) -> None:
        """whole: not the first half of one in halves."""
        if isinstance(self.held, FSDPModule):
            prepare_shards(self.held, self.plan, is_last, whole)

    def after_backward(self, is_last: bool, whole: bool) -> None:
        """whole: not the second half of one in halves."""
        for buckets in self.buckets if is_last else ():
            buckets.reduce()
        if isinstance(self.held, FSDPModule) and not whole and (is_last or self.plan.zero >= 2):
            self._fill_up()
            self.before_backward(is_last, whole=True)
            finish_sharded_backward(self.held)

    def _fill_up(self) -> None:
        """Every reduction of a step has the same parameters: what is done at once may be ahead of what was put off."""
        for parameter in self.held.parameters():
            if parameter.grad is not None:
                self.used[id(parameter)] = parameter
        for parameter in self.used.values():
            if parameter.grad is None:
                parameter.grad = parameter.new_zeros(parameter.shape)

    def finish(self) -> None:
        """Wait for the gradients that are on their way."""
        for buckets in self.buckets:
            buckets.finish()


def _key(name: str) -> str:
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")
