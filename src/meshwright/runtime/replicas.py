"""Whether data-parallel ranks still hold the same parameters, bit by bit.

A parameter's checksum is the sum of its bits, read as integers of its own width, modulo 2 to that width: one flipped bit always
changes it, and it costs one pass over the memory. Ranks that hold the same part of a parameter compare theirs, P integers for P
parameters. The rank that differs from the majority is the odd one; without a majority all of them are named.

    replicas                      along dp
    hybrid ZeRO: shards           along the replicas of a shard
    experts over ep               along the ranks that hold the same experts
    ZeRO over all of dp           nothing is held twice, nothing is compared
    state on the host             the masters there, once their updates are done, each as its parameter
    streamed blocks               rows that dp cuts are held once; whole parameters and what stays on the device along dp
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.core.errors import CorruptionError
from meshwright.core.run.fault import Fault
from meshwright.runtime.clip import local
from meshwright.runtime.experts import expert_parameters_of, expert_spread_of
from meshwright.runtime.gather import is_so_anywhere
from meshwright.runtime.messages.exchange import all_ranks

if TYPE_CHECKING:  # which reads checksums too
    from meshwright.runtime.program import Program

Odd = tuple[tuple[int, ...], str, int]
"""The odd ranks, the first parameter in which they differ, and in how many others."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """The parameters of a program that other ranks hold too, with these ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.shared: dict[dist.ProcessGroup, list[str]] = {}
        for name, group in _shared(program.module, program.replicated(), program.mesh):
            self.shared.setdefault(group, []).append(name)

    def check(self, step: int) -> None:
        """Every rank calls it. Raises the same error on all ranks where some rank's parameters are not those of the others."""
        held = self.program.replicated()
        found = next(filter(None, (self._odd(group, held) for group in self.shared)), None)
        if not is_so_anywhere(found is not None):
            return
        answers = all_ranks((found, socket.gethostname()), tuple[Odd | None, str])
        ranks, name, num_more = next(answer for answer, _ in answers if answer is not None)
        raise _error(ranks, name, num_more, step, answers[ranks[0]][1], len(answers))

    def _odd(self, group: dist.ProcessGroup, held: Mapping[str, Tensor]) -> Odd | None:
        """Among the ranks of one group."""
        names = self.shared[group]
        own = torch.stack([checksum(local(held[name])).to(self.program.device) for name in names])
        sums = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(sums, own, group=group)
        table = torch.stack(sums)
        differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
        if not differing:
            return None
        members = dist.get_process_group_ranks(group)
        odd = _minority(table[:, differing[0]].tolist())
        return tuple(members[place] for place in odd), names[differing[0]], len(differing) - 1


def checksum(tensor: Tensor) -> Tensor:
    """As a 64-bit integer, on the tensor's device."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    kind = INTEGERS[tensor.element_size()]
    return tensor.view(kind).sum(dtype=kind).to(torch.int64)


def _minority(sums: list[int]) -> list[int]:
    """Places of those that differ from more than half; all places where no value has more than half."""
    usual, count = Counter(sums).most_common(1)[0]
    if 2 * count <= len(sums):
        return list(range(len(sums)))
    return [place for place, found in enumerate(sums) if found != usual]


def _shared(module: nn.Module, held: Mapping[str, Tensor], mesh: DeviceMesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    experts, spread = expert_parameters_of(module), expert_spread_of(module)
    for name, parameter in held.items():
        if isinstance(parameter, DTensor):
            ranks = parameter.device_mesh
            group = ranks.get_group(0) if ranks.ndim > 1 else None
        elif name in experts:
            group = spread.replicas.get_group() if spread is not None else None
        else:
            group = mesh.get_group("dp")
        if group is not None and group.size() > 1 and parameter.numel():
            yield name, group


def _error(ranks: tuple[int, ...], name: str, num_more: int, step: int, host: str, num_ranks: int) -> CorruptionError:
    listed = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    verb = (
        "differs from the others"
        if len(ranks) == 1
        else "differ from each other, and no majority tells which is right,"
    )
    more = f" and {num_more} more" if num_more else ""
    words = (
        f"after step {step} {listed} of {num_ranks} {verb} in '{name}'{more}, which must be the same bit by bit: memory or a "
        f"device of host {host} is faulty, or something changes parameters on one rank alone. Test that host, and go on with "
        "--resume: every checkpoint was compared before it was written. Hosts with other processors may differ in last digits: "
        "then set faults.check_replicas_every = 0"
    )
    return CorruptionError(
        words, Fault(kind="corrupt", ranks=ranks, num_ranks=num_ranks, host=host, step=step, words=words)
    )
