"""A Sketch: a copy of a module without memory, on which a forward is followed before it is cut.

Made before anything is done to the module, so that neither shards nor hooks nor recompute are in it. Parameters and blocks
work on fake tensors; what comes of the batch alone runs on its values, so that a forward that looks at its batch goes the way
it will go on every stage. Nothing is communicated: all ranks come to the same Steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import MeshwrightError, PlanError
from meshwright.core.flow import OUTSIDE
from meshwright.models.block_hooks import check_block_hooks, recorders_apart
from meshwright.models.discovery import Discovery
from meshwright.models.experts import idle_experts
from meshwright.models.faked.attributes import plain_tensors
from meshwright.models.faked.copies import copy_module
from meshwright.models.faked.unchanged import unchanged
from meshwright.models.fakes import no_log_of_fakes
from meshwright.models.location import line_of
from meshwright.models.objective import Batch, Objective, call
from meshwright.models.snapshot import Snapshot
from meshwright.models.steps import Answer, Steps
from meshwright.models.twins import separate
from meshwright.runtime._torch import FakeTensorMode, around_calls


class Sketch:
    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        known: dict[Hashable, Answer] | None = None,
    ) -> None:
        """dtype: what floating parameters have while the module computes. computing: what it computes in. known: where given,
        blocks of one class and size that are called alike are followed once for all; what they returned is kept in it."""
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.blocks = tuple(blocks)
        self.device = device
        self.computing = computing
        self.known = known
        self.module = self._copy(module, dtype)
        separate(self.module, self.blocks)
        idle_experts(self.module)
        self.names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for name in self.blocks:
            around_calls(self.module.get_submodule(name), partial(partial, self._call_block, name))
        self._discovery: Discovery | None = None
        self._untouched = Snapshot(self.module.modules())

    def parameter(self, name: str) -> Tensor:
        """What stands in for a parameter, or a buffer, that another stage holds."""
        owner, _, leaf = name.rpartition(".")
        return getattr(self.module.get_submodule(owner), leaf)

    def train_like(self, module: nn.Module) -> None:
        for part, like in zip(self.module.modules(), module.modules(), strict=True):
            part.training = like.training

    def follow(self, batch: Batch, objective: Objective) -> Steps:
        """One forward and its loss, in the gradient mode of now."""
        discovery = self._discovery = Discovery(self)
        self._untouched.restore()  # what an earlier forward left behind is not what this one begins with
        try:
            with (
                no_log_of_fakes(),
                unchanged(self.module),
            ):  # until the loss has read what the forward left in variables
                with self.computing(), discovery:
                    output = self._call(batch)
                discovery.objective(objective, output, batch)
        finally:
            self._discovery = None
        return discovery.steps()

    def _call(self, batch: Batch) -> Any:
        try:
            return call(self.module, batch)
        except MeshwrightError:
            raise
        except Exception as error:  # the model's own code
            raise PlanError(
                "the model cannot be cut: a stage follows the blocks of other stages on tensors without values, and between them "
                f"its code fails: {type(error).__name__}: {' '.join(str(error).split())} ({line_of(error)}); set pp to 1"
            ) from error

    def block_of(self, parameter: str) -> str:
        return next((name for name in self.blocks if parameter.startswith(f"{name}.")), OUTSIDE)

    def _copy(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """The module's own code and settings; its tensors are only looked at."""
        made: dict[int, Any] = {}
        with self.fakes:
            for parameter in module.parameters():
                made[id(parameter)] = nn.Parameter(self._fake(parameter, dtype), parameter.requires_grad)
            for name in self.blocks:
                for buffer in module.get_submodule(name).buffers():
                    made[id(buffer)] = self._fake(buffer, dtype)
            for tensor in (*module.buffers(), *(tensor for *_, tensor in plain_tensors(module))):
                if tensor.is_meta:
                    made[id(tensor)] = self._fake(tensor, dtype)
        return copy_module(module, made)

    def _fake(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=kept, device=self.device)

    def _call_block(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        assert self._discovery is not None
        block = self.module.get_submodule(name)
        check_block_hooks(name, block)
        return recorders_apart(block, partial(self._discovery.block, name, call, arguments, options), arguments)
