"""Buffers that a forward writes (moving averages, codebooks, power iterations), the same on all dp ranks.

Every rank moves them by its own samples. Before the next forward the first rank's count, as DistributedDataParallel has it. Which
ones are written is learned in the first forward; a batch norm's are left out: training does not read them, and
`Program.sync_buffers` sends them round before anything else does.

A stage of a pipeline keeps graphs of several microbatches: there each forward gets buffers of its own, so that no backward meets a
value that a later forward wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ModelError
from meshwright.runtime._torch import FakeTensor
from meshwright.runtime.experts import expert_parameters_of
from meshwright.runtime.gathered import check_alike
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.replicas import checksum

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SyncedBuffers:
    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, keeps_graphs: bool = False, without: Sequence[str] = ()
    ) -> None:
        """group: the dp ranks. keeps_graphs: whether a forward may run before the backward of the one before it. without: modules
        in it that are not looked at."""
        self.module, self.group, self.keeps_graphs = module, group, keeps_graphs
        self._without = tuple(f"{name}." for name in without)
        self.written: list[str] | None = None
        """None until the first forward is done."""
        self._before: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        self._bits: dict[str, int] = {}

    def before_forward(self) -> None:
        for name in self.written or ():
            buffer = self.module.get_buffer(name)
            made = buffer.detach().clone() if self.keeps_graphs else buffer.detach()
            if self.group.size() > 1:
                dist.broadcast(made, group=self.group, group_src=0)
            if self.keeps_graphs:
                self._replace(buffer, made)
        first = self.written is None
        self._bits = self._checksums() if first else {}
        self._before = {
            name: (buffer, buffer._version, buffer.detach().clone() if first else None)
            for name, buffer in self._buffers().items()
        }

    def after_forward(self) -> None:
        """Every rank of the group calls it."""
        found = [name for name, buffer in self._buffers().items() if self._is_written(name, buffer)]
        if self.written is None:
            everywhere = all_ranks(found, list[str], self.group) if self._before and self.group.size() > 1 else [found]
            self.written = sorted({name for names in everywhere for name in names})
            now = self._checksums()
            check_alike({name: bits for name, bits in now.items() if self._bits.get(name) != bits}, self.group)
        else:
            self._check(found)
        self._before.clear()

    def _checksums(self) -> dict[str, int]:
        """Of parameters that every dp rank holds: these must stay alike."""
        apart = {id(parameter) for parameter in expert_parameters_of(self.module).values()}
        return {
            name: int(checksum(parameter))
            for name, parameter in self.module.named_parameters()
            if self.group.size() > 1
            and not isinstance(parameter, DTensor | FakeTensor)
            and id(parameter) not in apart
            and not name.startswith(self._without)
        }

    def _is_written(self, name: str, buffer: Tensor) -> bool:
        if name not in self._before:
            return self.written is None
        before, version, value = self._before[name]
        if buffer is before and buffer._version != version:
            return True  # if with the value it had: an average that starts at what it follows
        return value is not None and value.shape == buffer.shape and not torch.equal(value, buffer.detach())

    def _check(self, found: list[str]) -> None:
        assert self.written is not None
        late = next((name for name in found if name not in self.written), None)
        if late is not None and self.group.size() > 1:
            raise ModelError(
                f"buffer '{late}' is written in this forward and was not in the first one: the dp ranks cannot know of each other "
                "that it must be sent round; write it in every forward, if with the value it has, or set dp to 1"
            )

    def _buffers(self) -> dict[str, Tensor]:
        own = {
            id(buffer) for part in self.module.modules() if isinstance(part, BATCH_NORMS) for buffer in part.buffers()
        }
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if id(buffer) not in own and not name.startswith(self._without)
        }

    def _replace(self, buffer: Tensor, made: Tensor) -> None:
        for part in self.module.modules():
            for name, one in part._buffers.items():
                if one is buffer:
                    part._buffers[name] = made
