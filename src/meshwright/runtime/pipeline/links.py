"""Links between neighbouring stages: tensors there, gradients back, in order.

Sends return at once. What they send is kept until it has left: until the work says so (NCCL), or a message comes back that the
other side sent after it had taken it (gloo, `rules/schedules.py:receipts`). Receives are posted one piece of work ahead of the
piece that needs them, so that a message crosses while its taker computes. Each link has its own communicator (`communicators.py`).

Nothing but order tells messages of a link apart. The first message of a kind is preceded by a header that says shape, dtype and
layout of each of its tensors, which the receiver keeps for all later ones: under tp a rank sends its part, whose shape only the
sender knows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.pipeline.schedule import Action
from meshwright.core.plan import Plan
from meshwright.runtime.communicators import link_groups
from meshwright.runtime.pipeline.forms import HEADER_BYTES, Form, form_of, header, read_header


@dataclass(frozen=True)
class Sent:
    """A tensor that may not have left yet: it must be kept until it has."""

    work: Any
    tensor: Tensor
    action: Action


@dataclass(frozen=True)
class Coming:
    """A message that was asked for."""

    tensors: list[Tensor]
    landing: list[Tensor]
    works: list[Any]


class Links:
    """Of one coordinate to the others."""

    def __init__(self, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
        self.device = device
        self.here = mesh.get_local_rank("pp")
        self.groups = link_groups(plan, mesh)
        self.ranks = dist.get_process_group_ranks(mesh.get_group("pp"))
        self.over_host = device.type == "cuda" and dist.get_backend(mesh.get_group("pp")) == "gloo"
        """gloo sends no tensors of a GPU from rank to rank, though its collectives take them."""
        self.known: dict[Hashable, tuple[Form, ...]] = {}
        self.under_way: list[Sent] = []

    def send(self, coordinate: int, tensors: list[Tensor], key: Hashable, action: Action) -> None:
        """key: names messages of one kind, at both ends."""
        if not tensors:
            return
        if key not in self.known:
            self.known[key] = tuple(map(form_of, tensors))
            self._post(coordinate, header(self.known[key], self.device), action)
        self.send_like(coordinate, [tensor.detach() for tensor in tensors], action)

    def send_like(self, coordinate: int, tensors: list[Tensor], action: Action) -> None:
        """What the other end knows the form of."""
        self.under_way = [sent for sent in self.under_way if not sent.work.is_completed()]
        for tensor in tensors:
            self._post(coordinate, tensor.contiguous(), action)

    def read_header(self, coordinate: int, key: Hashable) -> None:
        """The first message of a kind is preceded by one."""
        if key not in self.known:
            expected = Form((HEADER_BYTES,), torch.uint8)
            self.known[key] = read_header(self.take(self.ask(coordinate, (expected,)))[0])

    def ask(self, coordinate: int, forms: tuple[Form, ...]) -> Coming:
        """Post the receives of a message; nothing is waited for."""
        tensors = [form.empty(self.device) for form in forms]
        landing = [torch.empty_like(tensor, device="cpu") if self.over_host else tensor for tensor in tensors]
        group, source = self.groups[coordinate, self.here], self.ranks[coordinate]
        return Coming(tensors, landing, [dist.irecv(tensor, source, group=group) for tensor in landing])

    def take(self, coming: Coming) -> list[Tensor]:
        """Wait for a message that was asked for."""
        for work in coming.works:
            work.wait()
        if self.over_host:
            for tensor, arrived in zip(coming.tensors, coming.landing, strict=True):
                tensor.copy_(arrived)
        return coming.tensors

    def release(self, actions: Collection[Action]) -> None:
        """These sends have arrived, and need not be kept. gloo does not say so of its own accord."""
        if actions:
            for sent in self.under_way:
                if sent.action in actions:
                    sent.work.wait()
            self.under_way = [sent for sent in self.under_way if sent.action not in actions]

    def finish(self, number: int | None = None) -> None:
        """Wait until everything has left, or the first so many of what is under way."""
        first = len(self.under_way) if number is None else number
        for sent in self.under_way[:first]:
            sent.work.wait()
        del self.under_way[:first]

    def _post(self, coordinate: int, tensor: Tensor, action: Action) -> None:
        leaving = tensor.cpu() if self.over_host else tensor
        work = dist.isend(leaving, self.ranks[coordinate], group=self.groups[self.here, coordinate])
        self.under_way.append(Sent(work, leaving, action))
